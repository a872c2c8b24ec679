"""The loss token by token: each clip, the KL, the weights, the sums."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.loss import clip_surrogate, grpo_loss, k3, token_weights
from learner_jax.loss_metrics import LossMetrics, log_ratio_counts, log_ratio_quantile
from learner_jax.packing import LossInputs
from runspec.core.spec.schema import Clip, Grpo

CLIP = Clip()


@pytest.mark.parametrize(
    ("ratio", "advantage", "value", "slope"),
    [
        (1.1, 2.0, 2.2, 2.0),  # inside: the plain policy gradient
        (1.5, 2.0, 2.4, 0.0),  # rewarded and far above: stopped at 1 + eps_high
        (0.5, 2.0, 1.0, 2.0),  # rewarded and far below: pulled back
        (0.5, -2.0, -1.6, 0.0),  # punished and far below: stopped at 1 - eps_low
        (3.0, -2.0, -6.0, -2.0),  # punished and above: pushed down
        (9.0, -2.0, -8.0, 0.0),  # punished and huge: stopped at delta, the second side
        (math.exp(20), -2.0, -8.0, 0.0),
    ],
)
def test_surrogate_has_two_sides(
    ratio: float, advantage: float, value: float, slope: float
) -> None:
    found, found_slope = jax.value_and_grad(clip_surrogate)(ratio, advantage, CLIP)
    assert float(found) == pytest.approx(value)
    assert float(found_slope) == pytest.approx(slope)


@pytest.mark.parametrize("difference", [-25.0, -1.0, 0.0, 0.5, 3.0])
def test_k3_is_its_formula_and_has_a_gradient(difference: float) -> None:
    # given ref - cur, then the value and d/dcur = 1 - exp(ref - cur)
    current, reference = -2.0, difference - 2.0
    value, slope = jax.value_and_grad(k3)(current, reference)
    assert float(value) == pytest.approx(math.exp(difference) - difference - 1, abs=1e-6)
    assert float(slope) == pytest.approx(1 - math.exp(difference), abs=1e-6)


def test_k3_stays_finite_where_the_reference_is_far_above() -> None:
    value, slope = jax.value_and_grad(k3)(-500.0, -1.0)
    assert math.isfinite(value) and math.isfinite(slope)


@pytest.mark.parametrize(
    ("normalizer", "expected"),
    [
        ("sequence", [1 / (2 * 3), 1 / (2 * 5)]),
        ("token", [1 / 8, 1 / 8]),
        ("constant", [1 / (2 * 10), 1 / (2 * 10)]),
    ],
)
def test_weights_of_the_normalisers(normalizer: Any, expected: list[float]) -> None:
    assert token_weights([3, 5], normalizer, max_new_tokens=10) == pytest.approx(expected)


SEGMENTS = np.ones((2, 6), np.int32)


def batch_of(seed: int = 0) -> tuple[dict[str, Any], jax.Array, jax.Array]:
    """Two rows of six positions, a third of them no output tokens, filled with nonsense."""
    rng = np.random.default_rng(seed)
    on = np.arange(12).reshape(2, 6) % 3 > 0
    fields = {
        "weights": np.where(on, 0.125, 0.0),
        "advantages": rng.normal(size=(2, 6)),
        "old_logprobs": np.where(on, rng.normal(size=(2, 6)), np.inf),
        "sampler_logprobs": np.where(on, rng.normal(size=(2, 6)), np.nan),
        "ref_logprobs": np.where(on, rng.normal(size=(2, 6)), -np.inf),
    }
    logprobs = jnp.asarray(np.where(on, rng.normal(size=(2, 6)), -1e30), jnp.float32)
    return fields, logprobs, jnp.asarray(rng.uniform(size=(2, 6)), jnp.float32)


def test_positions_without_an_output_token_carry_nothing() -> None:
    # given infinities and NaN where no output token is predicted
    fields, logprobs, entropy = batch_of()
    algorithm = Grpo(importance={"cap": 2.0}, kl={"coef": 0.1})

    def value(logprobs: jax.Array, entropy: jax.Array) -> Any:
        return grpo_loss(logprobs, entropy, SEGMENTS, LossInputs(**fields), algorithm)

    # when differentiated
    grads, metrics = jax.grad(value, (0, 1), has_aux=True)(logprobs, entropy)
    # then everything is finite and nothing flows there
    for grad in grads:
        assert np.isfinite(grad).all()
        assert not np.asarray(grad)[fields["weights"] == 0].any()
    assert all(math.isfinite(number) for number in metrics.means().values())
    assert float(metrics.tokens) == 8


def test_truncated_weights_scale_the_surrogate_alone() -> None:
    # given two tokens at ratio 1: pi_old / mu is e^2, capped at 3, and e^-1
    inputs = LossInputs(
        weights=np.full((1, 2), 0.5),
        advantages=np.ones((1, 2)),
        old_logprobs=np.array([[-1.0, -2.0]]),
        sampler_logprobs=np.array([[-3.0, -1.0]]),
        ref_logprobs=np.array([[-1.0, -1.5]]),
    )
    logprobs, entropy = jnp.array([[-1.0, -2.0]]), jnp.array([[0.4, 0.6]])
    algorithm = Grpo(importance={"cap": 3.0}, kl={"coef": 0.1}, entropy_coef=0.01)
    # when, then
    loss, metrics = grpo_loss(logprobs, entropy, SEGMENTS, inputs, algorithm)
    kl = math.exp(0.5) - 0.5 - 1
    policy_loss = -0.5 * (3.0 + math.exp(-1))
    assert float(metrics.policy_loss) == pytest.approx(policy_loss)
    assert float(loss) == pytest.approx(policy_loss + 0.1 * 0.5 * kl - 0.01 * 0.5)
    means = metrics.means()
    assert means["kl"] == pytest.approx(kl / 2)
    assert means["entropy"] == pytest.approx(0.5)
    assert means["policy_drift"] == pytest.approx(1.5)


def test_clip_fractions_count_where_the_gradient_stops() -> None:
    # given tokens at the ratios of each side
    ratios = np.array([[0.5, 0.5, 1.0, 1.5, 1.5, 9.0, 9.0, 1.0]])
    signs = np.array([[-1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 1.0, -1.0]])
    zeros = np.zeros_like(ratios)
    inputs = LossInputs(np.full_like(ratios, 1 / 8), signs, zeros, zeros, zeros)
    # when, then
    metrics = grpo_loss(jnp.log(ratios), jnp.zeros((1, 8)), SEGMENTS, inputs, Grpo())[1].means()
    assert metrics["clip_fraction_low"] == 1 / 8  # A < 0, r = 0.5
    assert metrics["clip_fraction_high"] == 2 / 8  # A > 0, r = 1.5 and 9
    assert metrics["clip_fraction_delta"] == 1 / 8  # A < 0, r = 9
    assert metrics["ratio_max"] == pytest.approx(9.0)


@pytest.mark.parametrize("spread", [1e-5, 1e-3, 0.05, 1.0, 12.0])
def test_ratio_quantiles_are_known_to_a_bin(spread: float) -> None:
    # given log ratios around a mean that is not 0, where half of the positions count
    rng = np.random.default_rng(0)
    log_ratio = np.clip(rng.normal(0.3 * spread, spread, (3, 700)), -20, 20)
    on = rng.integers(0, 2, log_ratio.shape) > 0
    # when counted in two microbatches, and asked for
    counts = sum(
        np.asarray(log_ratio_counts(jnp.asarray(part), jnp.asarray(mask)))
        for part, mask in ((log_ratio[:1], on[:1]), (log_ratio[1:], on[1:]))
    )
    # then each quantile is right to within the resolution that is stated
    assert counts.sum() == on.sum()
    for share in (0.01, 0.3, 0.5, 0.99):
        truth = np.quantile(log_ratio[on], share, method="inverted_cdf")
        assert abs(log_ratio_quantile(counts, share) - truth) <= max(2e-5, 0.12 * abs(truth))


def test_tokens_whose_loss_is_not_finite_are_counted() -> None:
    # given a NaN among what the sampler, the advantage and the policy say of three output tokens
    fields, logprobs, entropy = batch_of()
    algorithm = Grpo(importance={"cap": 2.0}, ratio="sequence")
    on = np.argwhere(fields["weights"] > 0)
    fields["sampler_logprobs"][tuple(on[0])] = np.nan
    fields["advantages"][tuple(on[1])] = np.inf
    segments = np.arange(12).reshape(2, 6)  # each token a sample of its own
    # when, then
    broken = logprobs.at[tuple(on[2])].set(jnp.nan)
    metrics = grpo_loss(broken, entropy, segments, LossInputs(**fields), algorithm)[1]
    assert int(metrics.nonfinite) == 3
    assert metrics.means()["nonfinite_tokens"] == 3.0
    assert not math.isfinite(metrics.means()["loss"])


def test_distances_to_the_sampler_are_those_of_their_formulas() -> None:
    # given three output tokens
    current, old, mu = (
        np.array([x]) for x in ([-1.0, -2.0, -0.5], [-1.2, -1.7, -0.5], [-1.1, -1.0, -0.9])
    )
    ones = np.ones((1, 3))
    inputs = LossInputs(ones / 3, ones, old, mu, old)
    # when
    numbers = grpo_loss(jnp.asarray(current), jnp.asarray(ones), SEGMENTS, inputs, Grpo())[
        1
    ].means()
    # then KL(mu || .) is estimated on mu's tokens, without bias: E_mu[x / mu - 1 - log(x / mu)]
    for name, policy in (("kl_sampler", current), ("kl_sampler_old", old)):
        expected = np.mean(np.exp(policy - mu) - 1 - (policy - mu))
        assert numbers[name] == pytest.approx(expected, rel=1e-5)
    assert numbers["policy_drift"] == pytest.approx(np.mean(np.abs(current - mu)))
    assert numbers["policy_drift_signed"] == pytest.approx(np.mean(current - mu))


def test_metrics_of_microbatches_merge_to_those_of_the_batch() -> None:
    fields, logprobs, entropy = batch_of()
    algorithm = Grpo()

    def metrics_of(rows: slice) -> LossMetrics:
        inputs = LossInputs(**{name: value[rows] for name, value in fields.items()})
        return grpo_loss(logprobs[rows], entropy[rows], SEGMENTS[rows], inputs, algorithm)[1]

    merged = LossMetrics.zeros().merge(metrics_of(slice(0, 1))).merge(metrics_of(slice(1, 2)))
    assert merged.means() == pytest.approx(metrics_of(slice(0, 2)).means(), rel=1e-5)


def test_a_kl_term_without_a_reference_is_refused() -> None:
    fields, logprobs, entropy = batch_of()
    inputs = LossInputs(**{**fields, "ref_logprobs": None})
    with pytest.raises(ValueError, match="reference"):
        grpo_loss(logprobs, entropy, SEGMENTS, inputs, Grpo())
    # and without the term none is needed
    assert grpo_loss(logprobs, entropy, SEGMENTS, inputs, Grpo(kl={"coef": 0.0}))[1].kl == 0
