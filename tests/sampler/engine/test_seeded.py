"""Others' rows in a batch (a probe's, say) change nothing of ours, whenever they come and go."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate

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
