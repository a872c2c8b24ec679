"""The configurations that docs/learner_jax.md calls by papers' names are those papers' formulas."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.advantage import group_advantages
from learner_jax.loss import grpo_loss, token_weights
from learner_jax.packing import LossInputs, Sample, pack
from runspec.core.spec.schema import Grpo
from tests.runspec.core.spec.spec_files import load, small_spec

PAGE = (Path(__file__).parents[2] / "docs" / "learner_jax.md").read_text(encoding="utf-8")
CONFIGURATIONS = dict(re.findall(r"^\| ([\w. -]+) \(\d{4}\.\d{5}\) \| `(\{.*\})` \|$", PAGE, re.M))
MAX_NEW_TOKENS = 48  # of the small spec's pool
LENGTHS = (5, 9, 2, 7)
Values = list[jax.Array]
Objective = Callable[[Values, Values, Values, Values, np.ndarray], jax.Array]
"""What to maximise, from log pi_theta, entropies, log pi_old and log pi_ref, an array a sample, and
the rewards."""


def standardised(rewards: np.ndarray) -> np.ndarray:
    return (rewards - rewards.mean()) / rewards.std(ddof=1)


def clipped(ratio: jax.Array, a: float, low: float, high: float) -> jax.Array:
    return jnp.minimum(ratio * a, jnp.clip(ratio, 1 - low, 1 + high) * a)


def grpo(now: Values, entropy: Values, old: Values, ref: Values, rewards: np.ndarray) -> jax.Array:
    """DeepSeekMath, equations 3 and 4."""
    total = 0.0
    for p, q, r, a in zip(now, old, ref, standardised(rewards), strict=True):
        kl = jnp.exp(r - p) - (r - p) - 1
        total += (clipped(jnp.exp(p - q), a, 0.2, 0.2) - 0.04 * kl).mean()
    return total / len(now)


def intellect2(
    now: Values, entropy: Values, old: Values, ref: Values, rewards: np.ndarray
) -> jax.Array:
    """INTELLECT-2, section 4.1: the second side, KL 1e-3 and entropy 1e-4."""
    total = 0.0
    for p, h, q, r, a in zip(now, entropy, old, ref, standardised(rewards), strict=True):
        ratio = jnp.exp(p - q)
        gain = jnp.minimum(jnp.minimum(ratio, 4) * a, jnp.clip(ratio, 0.8, 1.2) * a)
        kl = jnp.exp(r - p) - (r - p) - 1
        total += (gain - 0.001 * kl + 1e-4 * h).mean()
    return total / len(now)


def dapo(now: Values, entropy: Values, old: Values, ref: Values, rewards: np.ndarray) -> jax.Array:
    """DAPO, equation 8."""
    rows = zip(now, old, standardised(rewards), strict=True)
    total = sum(clipped(jnp.exp(p - q), a, 0.2, 0.28).sum() for p, q, a in rows)
    return total / sum(LENGTHS)


def dr_grpo(
    now: Values, entropy: Values, old: Values, ref: Values, rewards: np.ndarray
) -> jax.Array:
    """Understanding R1-Zero-like training, figure 1, with the constant that its code divides by."""
    rows = zip(now, old, rewards - rewards.mean(), strict=True)
    total = sum(clipped(jnp.exp(p - q), a, 0.2, 0.2).sum() for p, q, a in rows)
    return total / len(now) / MAX_NEW_TOKENS


def gspo(now: Values, entropy: Values, old: Values, ref: Values, rewards: np.ndarray) -> jax.Array:
    """GSPO, equations 5 and 7."""
    total = 0.0
    for p, q, a in zip(now, old, standardised(rewards), strict=True):
        s = (jnp.exp(p.sum()) / jnp.exp(q.sum())) ** (1 / len(p))
        total += clipped(s, a, 3e-4, 4e-4)
    return total / len(now)


def cispo(now: Values, entropy: Values, old: Values, ref: Values, rewards: np.ndarray) -> jax.Array:
    """MiniMax-M1, equations 4 and 5, without a lower bound."""
    total = 0.0
    for p, q, a in zip(now, old, standardised(rewards), strict=True):
        total += (jax.lax.stop_gradient(jnp.minimum(jnp.exp(p - q), 3.0)) * a * p).sum()
    return total / sum(LENGTHS)


PAPERS: dict[str, Objective] = {
    "INTELLECT-2": intellect2,
    "GRPO": grpo,
    "DAPO": dapo,
    "Dr. GRPO": dr_grpo,
    "GSPO": gspo,
    "CISPO": cispo,
}


def test_every_configuration_of_the_page_has_its_formula() -> None:
    assert CONFIGURATIONS.keys() == PAPERS.keys()


def group(algorithm: Grpo) -> tuple[Values, Values, Values, Values, np.ndarray]:
    """One group of four, its ratios within and beyond the bounds of the algorithm."""
    rng = np.random.default_rng(7)
    spread = 6 * algorithm.clip.eps_high if algorithm.ratio == "sequence" else 0.5
    old, ref = ([rng.normal(-2, 0.5, n) for n in LENGTHS] for _ in range(2))
    now = [q + spread * rng.normal(size=len(q)) for q in old]
    entropy = [rng.uniform(0.5, 3, n) for n in LENGTHS]
    return now, entropy, old, ref, np.array([1.0, 0.0, 0.0, 0.7])


@pytest.mark.parametrize("paper", PAPERS)
def test_a_configuration_is_the_formula_of_its_paper(paper: str, tmp_path: Path) -> None:
    # given the page's configuration, in a spec that lints clean, and one group
    loaded = load(small_spec(tmp_path), f"algorithm={CONFIGURATIONS[paper]}")
    assert loaded.findings == []
    algorithm = loaded.require().algorithm
    with jax.enable_x64(True):
        now, entropy, old, ref, rewards = group(algorithm)
        # when the learner computes it, packed in one row
        prompt = np.zeros(3, np.int32)
        packed = pack([Sample(prompt, np.zeros(n, np.int32)) for n in LENGTHS], tokens=40, rows=1)
        zeros = np.zeros_like(rewards)
        advantages = group_advantages(
            rewards, zeros, rewards, normalize=algorithm.advantage.normalize
        )
        per_token = token_weights(LENGTHS, algorithm.loss_normalizer, max_new_tokens=MAX_NEW_TOKENS)
        full = (
            [np.full(n, x) for n, x in zip(LENGTHS, row, strict=True)]
            for row in (per_token, advantages)
        )
        inputs = LossInputs(*(packed.scatter(values)[0] for values in (*full, old, old, ref)))
        segments = packed.token_batch(0).segment_ids
        value, grad = jax.jit(
            jax.value_and_grad(lambda p, h: grpo_loss(p, h, segments, inputs, algorithm)[0])
        )(packed.scatter(now)[0], packed.scatter(entropy)[0])
        # and the paper's objective is differentiated
        truth, expected = jax.value_and_grad(PAPERS[paper])(now, entropy, old, ref, rewards)
    # then one is the other's negative, but for the 1e-6 that keeps our std from 0
    assert float(value) == pytest.approx(-float(truth), rel=1e-5)
    for ours, theirs in zip(packed.gather(np.asarray(grad)[None]), expected, strict=True):
        np.testing.assert_allclose(ours, -theirs, rtol=1e-5, atol=1e-12)
    # and where clipping alone decides, it has stopped some token's gradient
    if algorithm.surrogate == "clip" and not algorithm.kl.coef:
        assert not all(np.asarray(theirs).all() for theirs in expected)
