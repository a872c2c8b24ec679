"""The short way to log-probs and gaps against the definition, where `exp` underflows too."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from verify.noise import gumbel
from verify.token_facts import Drawn, Vocabulary, Wanted, facts_of, token_facts

VOCABULARY = 1000
BELOW = (
    0.0,
    60.0,
    65.0,
    68.0,
    70.0,
    75.0,
    80.0,
    85.0,
    87.0,
    90.0,
    95.0,
    100.0,
    104.0,
    110.0,
    300.0,
)
"""Nats of the token below the top: 69 are those of `_UNDERFLOW`, 88 and 104 those of float32."""
WANTED = Wanted(gaps=True, choices=False, truncation=None)


def rows() -> tuple[np.ndarray, list[np.ndarray]]:
    """f32 [n, V] logits / T over 300 nats, and i32 [n, 1] token, position and words of the key."""
    rng = np.random.default_rng(0)
    repeats = 8
    below = np.repeat(BELOW, repeats)
    scaled = -rng.uniform(0, 300, (len(below), VOCABULARY))
    token = rng.integers(0, VOCABULARY, len(below))
    at = np.arange(len(below))
    scaled[at, (token + 1) % VOCABULARY] = 0
    scaled[at, token] = -below
    scaled += rng.uniform(-30, 30, (len(below), 1))  # of a row, all shifted alike
    keys = rng.integers(-(2**31), 2**31, (2, len(below)))
    columns = (token, rng.integers(0, 5000, len(below)), *keys)
    return scaled.astype(np.float32), [column.astype(np.int32)[:, None] for column in columns]


def both(xp: Any, as_array: Any, scaled: np.ndarray, columns: list[np.ndarray]) -> list[np.ndarray]:
    """Log-probs and gaps, f32 [n], by the short way and by the definition."""
    logits, drawn = as_array(scaled), Drawn(*map(as_array, columns))
    ids = as_array(np.arange(VOCABULARY, dtype=np.int32)[None])
    short = facts_of(xp, logits, drawn, Vocabulary.of(ids), 0, WANTED)
    noise = gumbel(xp, drawn.key_0, drawn.key_1, drawn.position, ids)
    own = ids == drawn.token
    full = token_facts(xp, logits, noise, own, ids == 0, WANTED)
    found = (short.logprobs, full.logprobs, short.gaps, full.gaps)
    return [np.asarray(each) for each in found]


LIBRARIES = pytest.mark.parametrize(
    "xp, as_array",
    [(np, np.asarray), (jnp, jnp.asarray), (torch, torch.from_numpy)],
    ids=["numpy", "jax", "torch"],
)


@LIBRARIES
def test_a_token_however_far_below_the_top_has_its_gap(xp: Any, as_array: Any) -> None:
    # given tokens at the top, at the edge of underflow and far beyond
    scaled, columns = rows()
    # when both ways are taken
    logprobs, expected_logprobs, gaps, expected = both(xp, as_array, scaled, columns)
    # then they say the same, finite numbers
    assert np.isfinite(gaps).all() and np.isfinite(logprobs).all()
    np.testing.assert_allclose(gaps, expected, rtol=0, atol=1e-4)
    np.testing.assert_allclose(logprobs, expected_logprobs, rtol=0, atol=1e-4)


@LIBRARIES
def test_the_token_that_wins_has_no_gap_at_all(xp: Any, as_array: Any) -> None:
    # given in each row the token that its noise makes the winner
    scaled, (_, *noise) = rows()
    position, key_0, key_1 = noise
    ids = np.arange(VOCABULARY, dtype=np.int32)[None]
    winner = (scaled + gumbel(np, key_0, key_1, position, ids)).argmax(-1)
    # when both ways are taken, then its gap is 0 and no rounding of 0
    _, _, gaps, expected = both(xp, as_array, scaled, [winner.astype(np.int32)[:, None], *noise])
    assert (gaps == 0).all() and (expected == 0).all()
