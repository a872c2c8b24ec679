"""Beside others' rows, which change nothing, and CUDA graphs, where nothing waits for the device.

There is no GPU here: devices are torch's fake ones, which have shapes and no numbers, so that
whatever reads a number fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate

from sampler.engine.sampling import TokenRecorder
from sampler.engine.worker_extension import SeededSampler, sampling_arguments

VOCABULARY = 50
OTHER = SamplingParams(temperature=0.0)


def ours(number: int) -> SamplingParams:
    return SamplingParams(
        temperature=0.0, extra_args=sampling_arguments(number, (11 * number, 7 + number), 0.9)
    )


def changed(
    size: int, *added: tuple[int, SamplingParams], removed: int | None = None
) -> BatchUpdate:
    return BatchUpdate(
        batch_size=size,
        removed=[] if removed is None else [removed],
        moved=[],
        added=[(row, params, None, []) for row, params in added],
    )


@pytest.fixture
def sampler() -> SeededSampler:
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0))  # all that it reads
    return SeededSampler(config, torch.device("cpu"), False)


def logits(rows: int) -> torch.Tensor:
    return torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(5))


def test_rows_of_others_may_join_and_leave_a_batch_that_is_all_ours(sampler: SeededSampler) -> None:
    # given a batch of two of ours
    sampler.update_state(changed(2, (0, ours(0)), (1, ours(1))))
    alone = sampler.apply(logits(3)[:2].clone()).argmax(-1)
    # when another joins it
    sampler.update_state(changed(3, (2, OTHER)))
    joined = sampler.apply(logits(3))
    # then ours are sampled as before, and the other's logits are as they were
    assert torch.equal(joined[:2].argmax(-1), alone)
    assert torch.equal(joined[2], logits(3)[2])
    # and when it leaves, all are ours again
    sampler.update_state(changed(2, removed=2))
    assert torch.equal(sampler.apply(logits(3)[:2].clone()).argmax(-1), alone)


def test_a_batch_without_ours_is_left_alone(sampler: SeededSampler) -> None:
    sampler.update_state(changed(1, (0, OTHER)))
    assert torch.equal(sampler.apply(logits(1)), logits(1))


CUDA = torch.device("cuda", 0)
HIDDEN = 16


class _NoWaiting(TorchDispatchMode):
    """Fails where a copy between host and device waits for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            to = torch.device(kwargs.get("device") or args[0].device)
            if to.type != args[0].device.type and not kwargs.get("non_blocking"):
                raise AssertionError(f"a copy from {args[0].device} to {to} waits")
        return func(*args, **kwargs)


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors have shapes and devices alone; one that is read raises."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)  # no driver here
    with FakeTensorMode(allow_non_fake_inputs=True), _NoWaiting():
        yield


def test_the_fake_gpu_refuses_what_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_gpu(monkeypatch):
        tensor = torch.zeros(3, device=CUDA)
        with pytest.raises(DataDependentOutputException):
            tensor.sum().item()
        with pytest.raises(AssertionError, match="waits"):
            tensor.cpu()


def test_sampling_and_recording_never_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    config = SimpleNamespace(parallel_config=SimpleNamespace(rank=0))
    outputs: list[int] = []
    with fake_gpu(monkeypatch):
        sampler = SeededSampler(config, CUDA, True)
        sampler.recorder = TokenRecorder(4, 80, HIDDEN, CUDA)
        update = changed(2, (0, ours(0)), (1, ours(1)))
        sampler.update_state(
            update.__class__(2, [], [], [(*row[:3], outputs) for row in update.added])
        )
        for position in range(70):  # two chunks are selected on the way
            outputs[:] = range(position)
            sampler.see_hidden(torch.zeros(2, HIDDEN, dtype=torch.bfloat16, device=CUDA))
            marks = sampler.apply(torch.zeros(2, VOCABULARY, device=CUDA))
            assert marks.device == CUDA
