"""Whether an engine computes with the version that it was told to load."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from sampler.engine.engine import Engine
from sampler.engine.requests import Sampled, SampleRequest
from tests.sampler.engine.models import Reference
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
