"""Batches of requests over a few prompts, each with its own noise."""

from __future__ import annotations

import numpy as np

from sampler.engine.requests import SampleRequest
from tests.sampler.engine.models import END_TOKEN, MAX_NEW_TOKENS, VOCABULARY
from verify.noise import noise_key

WAIT_S = 120.0
"""How long a test waits for what it submitted."""


def batch(
    groups: int = 4, size: int = 4, *, temperature: float = 1.0, seeded: bool = True
) -> list[SampleRequest]:
    """`groups` prompts of different lengths, `size` samples of each."""
    generator = np.random.default_rng(5)
    requests = []
    for group in range(groups):
        prompt = generator.integers(2, VOCABULARY, 34 + 5 * (group % 4)).tolist()
        for sample in range(size):
            key = noise_key(b"\x05" * 32, group, sample) if seeded else None
            requests.append(SampleRequest(prompt, MAX_NEW_TOKENS, END_TOKEN, temperature, key))
    return requests
