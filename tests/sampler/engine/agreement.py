"""Whether an engine computes with the version that it was told to load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from runspec.core.errors import UserError
from sampler.engine.engine import Engine
from sampler.engine.requests import Sampled, SampleRequest
from tests.sampler.engine.models import Reference, write_probe
from tests.sampler.engine.requests import WAIT_S, batch

Text = tuple[list[int], list[int]]
"""Prompt and output tokens."""


def assert_follows(
    engine: Engine,
    version: Path,
    logprobs: Callable[[list[Text]], list[np.ndarray]],
    *,
    limit: float = 1e-5,
) -> None:
    """A load makes an engine sample from a version, and from no part of the one before.

    The prompts are the same each time: keys and values cached under old weights would show.

    Args:
        engine: holds another version.
        version: loaded as number 1.
        logprobs: f32 [n] of each text's output tokens under `version`, by the reference.
        limit: of the mean |engine's log-prob - reference's|.
    """
    requests = batch(2, 2)

    def sample() -> tuple[list[Text], np.ndarray]:
        found = engine.submit(requests).result(WAIT_S)
        texts = [
            (list(request.prompt_tokens), result.output_tokens.tolist())
            for request, result in zip(requests, found, strict=True)
        ]
        return texts, np.concatenate([result.logprobs for result in found])

    old_texts, old = sample()

    engine.load(version, 1)

    new_texts, new = sample()
    expected = np.concatenate(logprobs(new_texts + old_texts))
    assert np.abs(new - expected[: len(new)]).mean() < limit
    # Else the test would prove nothing:
    assert np.abs(old - expected[len(new) :]).mean() > 10 * limit


def assert_samples(
    engine: Engine, version: Path, requests: Sequence[SampleRequest] | None = None
) -> list[Sampled]:
    """What an engine samples is of a version, as transformers says; returns it."""
    reference, requests = Reference(version), batch(2, 2) if requests is None else requests
    sampled = engine.submit(requests).result(WAIT_S)
    for request, result in zip(requests, sampled, strict=True):
        expected, _ = reference.logprobs(list(request.prompt_tokens), result.output_tokens.tolist())
        assert np.abs(result.logprobs - expected).mean() < 1e-5
    return sampled


def scattered(source: Path, directory: Path, *, share: float = 0.02, seed: int = 1) -> Path:
    """A copy of a version in which some elements of every tensor differ, here and there."""
    directory.mkdir()
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        chosen.view(-1)[-1] = True  # the last rank's last one too
        noise = 0.3 * torch.randn(tensor.shape, generator=generator)
        tensors[name] = torch.where(chosen, tensor + noise.to(tensor.dtype), tensor)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_probe(directory)
    return directory


def assert_takes_over(engine: Engine, base: Path, folder: Path) -> None:
    """A patched engine samples from the new version; one that was not patched does not pass for it,
    and a version of other tensors is not patched, not even in part."""
    engine.load(base, 0)
    newer = scattered(base, folder / "v1")
    with pytest.raises(UserError, match="version 1"):
        engine.check(newer, 1)

    # `load` compares bytes and probe; once, again and back
    further = scattered(newer, folder / "v2", share=0.5, seed=2)
    for number, version in ((1, newer), (2, further), (0, base)):
        assert engine.load(version, number).patched
        assert_samples(engine, version)

    tensors = load_file(newer / "model.safetensors")
    tensors["model.layers.0.self_attn.extra.weight"] = torch.zeros(3)
    save_file(tensors, newer / "model.safetensors", metadata={"format": "pt"})
    assert not engine.patch(base, newer)
    assert_samples(engine, base)
