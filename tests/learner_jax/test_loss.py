"""The policy's loss: log-probs, advantages, weights, clips, KL and sums, by formula and paper.

What exists of logits, and what a mesh sends, is in test_gradients.
"""

from __future__ import annotations

import math
import re
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.batch import group_advantages
from learner_jax.logprobs import token_logprobs
from learner_jax.loss import clip_surrogate, grpo_loss, k3, segment_sums
from learner_jax.metrics import LossMetrics, log_ratio_counts, log_ratio_quantile
from learner_jax.packing import LossInputs, Sample, pack
from learner_jax.sharding import make_mesh, shard_batch
from runspec.core.models.parameters import KEPT_LOGITS
from runspec.core.schema import Clip, Grpo, Mesh
from tests.learner_jax.reference import (
    MAX_NEW_TOKENS,
    Rollout,
    clipped_gain,
    inputs_of,
    loss_of_logprobs,
    make_rollouts,
    relative_errors,
)
from tests.runspec.core.schema.spec_files import load, small_spec
from verify.formats.turns import joined

TASK = np.array([1.0, 0.0, 0.0, 1.0])
PENALTY = np.array([-0.2, -0.1, 0.0, -0.4])
REWARD = TASK + PENALTY


@pytest.mark.parametrize(
    ("normalize", "expected"),
    [
        ("none", REWARD - statistics.fmean(REWARD)),
        ("std", (REWARD - statistics.fmean(REWARD)) / (statistics.stdev(REWARD) + 1e-6)),
        ("task", (TASK - 0.5) / (statistics.stdev(TASK) + 1e-6) + PENALTY + 0.175),
    ],
)
def test_advantages_are_those_of_their_formula(normalize, expected):
    # given one group, then its advantages are the formula's
    arrays = TASK, PENALTY, REWARD
    np.testing.assert_allclose(group_advantages(*arrays, normalize=normalize), expected, rtol=1e-12)
    # and those of several groups at once are those of each alone
    both = group_advantages(*(np.array([x, x[::-1]]) for x in arrays), normalize=normalize)
    np.testing.assert_allclose(both, [expected, expected[::-1]], rtol=1e-12)
    # and equal rewards have none
    assert not group_advantages(np.ones(3), np.zeros(3), np.ones(3), normalize=normalize).any()
    # and a group of one is refused
    with pytest.raises(ValueError, match="at least two"):
        group_advantages(*(x[:1] for x in arrays), normalize=normalize)
    assert group_advantages(*(x[:2] for x in arrays), normalize=normalize).any()


def test_task_advantages_need_rewards_that_are_a_sum_but_for_the_rounding_of_verdict_files():
    # given `max` rewards: task times a factor of the length
    with pytest.raises(ValueError, match="task reward"):
        group_advantages(TASK, PENALTY, np.array([0.5, 0.0, 0.0, 0.7]), normalize="task")
    # given rewards in the hundreds, each rounded to float32 by itself: by more than 1e-5
    task = np.array([0.3, 0.05, 1.0, 0.0])
    penalty = -0.02 * np.array([15_999.0, 9_001.0, 40.0, 15_000.0])
    rounded = (np.float32(x) for x in (task, penalty, task + penalty))
    exact = group_advantages(task, penalty, task + penalty, normalize="task")
    np.testing.assert_allclose(group_advantages(*rounded, normalize="task"), exact, atol=1e-4)
    with pytest.raises(ValueError, match="task reward"):
        group_advantages(task, penalty, task + penalty + 1e-3, normalize="task")


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("delta", [None, 4.0])
def test_ties_are_split_as_in_the_formula(advantage, delta):
    # given ratios exactly at 1, where recomputed log-probs begin, and exactly at each bound
    clip, bounds = Clip(eps_low=0.25, eps_high=0.25, delta=delta), np.array([1.0, 0.75, 1.25, 4.0])
    found, expected = (
        jax.grad(lambda ratios, gain=gain: gain(ratios, advantage, clip).sum())(bounds).tolist()
        for gain in (clip_surrogate, clipped_gain)
    )
    # then the gradients are the formula's, and at 1 that of the plain policy gradient
    assert found == expected and found[0] == advantage


def test_exponents_are_held_at_20():
    # given a reference far above, then only the linear part of the KL moves
    value, slope = jax.value_and_grad(k3)(-500.0, -1.0)
    assert (float(value), float(slope)) == pytest.approx((math.exp(20) - 500, 1.0), rel=1e-6)
    # given a ratio of e^25 and one of e^-25, then they count as e^20 and e^-20
    inputs = LossInputs(*np.ones((2, 1, 2)), np.array([[-25.0, 0.0]]), np.zeros((1, 2)), None)
    algorithm = Grpo(kl={"coef": 0.0}, entropy_coef=0.0, clip={"eps_high": 1e9, "delta": None})
    logprobs = jnp.array([[0.0, -25.0]])
    loss, metrics = grpo_loss(logprobs, jnp.zeros((1, 2)), np.ones((1, 2)), inputs, algorithm)
    assert float(loss) == pytest.approx(-math.exp(20), rel=1e-6)
    assert metrics.means()["ratio_max"] == pytest.approx(math.exp(20), rel=1e-6)


def test_sums_over_samples_are_those_of_a_loop_and_what_is_not_finite_stays_in_its_sample():
    # given rows of samples of these lengths, and one that is all padding
    rows = [[5], [1], [3, 1, 1, 7], [2] * 5, [16], [1, 18, 1], [6, 9, 5], [21], []]
    ids = np.zeros((len(rows), 21), int)
    for row, lengths in zip(ids, rows, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(1, len(lengths) + 1), lengths)
    values = np.random.default_rng(0).normal(size=ids.shape)
    # when summed, and half the sum of their squares differentiated
    with jax.enable_x64(True):
        found, back = jax.jit(partial(jax.vjp, partial(segment_sums, segment_ids=ids)))(values)
        (slope,) = back(found)
    # then both are those of a loop over the samples
    for r, sample in {(r, sample) for (r, _), sample in np.ndenumerate(ids)}:
        mine = ids[r] == sample
        total = values[r, mine].sum()
        np.testing.assert_allclose(found[r, mine], total, rtol=1e-12, atol=1e-13)
        np.testing.assert_allclose(slope[r, mine], total * mine.sum(), rtol=1e-12, atol=1e-11)
    broken = jnp.array([[1.0, 2.0, jnp.nan, jnp.inf, 4.0, 5.0]])
    sums = np.asarray(segment_sums(broken, np.array([[1, 1, 2, 2, 3, 0]])))[0]
    np.testing.assert_array_equal(sums, [3.0, 3.0, np.nan, np.nan, 4.0, 5.0])


SEGMENTS = np.ones((2, 6), np.int32)


def batch_of() -> tuple[dict[str, Any], jax.Array, jax.Array]:
    """Two rows of six positions, a third of them no output tokens, filled with nonsense."""
    rng = np.random.default_rng(0)
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


def test_positions_without_an_output_token_carry_nothing():
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


def test_clip_fractions_count_where_the_gradient_stops():
    # given tokens at the ratios of each side
    ratios = np.array([[0.5, 0.5, 1.0, 1.5, 1.5, 9.0, 9.0, 1.0]])
    signs = np.array([[-1.0, 1.0, 1.0, 1.0, -1.0, -1.0, 1.0, -1.0]])
    zeros = np.zeros_like(ratios)
    inputs = LossInputs(np.full_like(ratios, 1 / 8), signs, zeros, zeros, zeros)

    def sides(**algorithm: Any) -> list[float]:
        segments = np.ones_like(ratios, int)
        metrics = grpo_loss(jnp.log(ratios), zeros, segments, inputs, Grpo(**algorithm))[1].means()
        assert metrics["ratio_max"] == pytest.approx(9.0)
        return [8 * metrics[f"clip_fraction_{side}"] for side in ("low", "high", "delta")]

    # then low counts A < 0, r = 0.5; high A > 0, r = 1.5 and 9; delta A < 0, r = 9
    assert sides() == [1, 2, 1]
    assert sides(clip={"delta": None}) == [1, 2, 0]
    # and a clipped weight is clipped whatever the sign
    assert sides(surrogate="cispo", clip={"delta": None}) == [2, 4, 0]


@pytest.mark.parametrize("spread", [1e-5, 1e-3, 0.05, 1.0, 12.0])
def test_ratio_quantiles_are_known_to_a_bin(spread):
    # given log ratios around a mean that is not 0, where half of the positions count
    rng = np.random.default_rng(0)
    log_ratio = np.clip(rng.normal(0.3 * spread, spread, (4, 700)), -20, 20)
    on = rng.integers(0, 2, log_ratio.shape) > 0
    log_ratio[~on] = np.nan
    # when counted in two microbatches, and asked for
    counts = sum(
        np.asarray(log_ratio_counts(jnp.asarray(log_ratio[part]), jnp.asarray(on[part])))
        for part in (slice(0, 2), slice(2, 4))
    )
    # then each quantile is right to within the resolution that is stated
    assert counts.sum() == on.sum()
    for share in (0.01, 0.3, 0.5, 0.99):
        truth = np.quantile(log_ratio[on], share, method="inverted_cdf")
        assert abs(log_ratio_quantile(counts, share) - truth) <= max(2e-5, 0.12 * abs(truth))
    assert log_ratio_quantile(0 * counts, 0.5) == 0.0


def test_tokens_whose_loss_is_not_finite_are_counted():
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
    assert metrics.means()["nonfinite_tokens"] == int(metrics.nonfinite) == 3
    assert not math.isfinite(metrics.means()["loss"])


def test_distances_to_the_sampler_are_those_of_their_formulas():
    # given three output tokens
    current, old, mu = (
        np.array([x]) for x in ([-1.0, -2.0, -0.5], [-1.2, -1.7, -0.5], [-1.1, -1.0, -0.9])
    )
    ones = np.ones((1, 3))
    inputs = LossInputs(ones / 3, ones, old, mu, old)
    # when
    numbers = grpo_loss(jnp.asarray(current), ones, ones, inputs, Grpo())[1].means()
    # then KL(mu || .) is estimated on mu's tokens, without bias: E_mu[x / mu - 1 - log(x / mu)]
    for name, policy in (("kl_sampler", current), ("kl_sampler_old", old)):
        expected = np.mean(np.exp(policy - mu) - 1 - (policy - mu))
        assert numbers[name] == pytest.approx(expected, rel=1e-5)
    away = old - current  # the reference is old
    assert numbers["kl"] == pytest.approx(np.mean(np.exp(away) - away - 1), rel=1e-5)
    assert numbers["entropy"] == pytest.approx(1.0)
    assert numbers["policy_drift"] == pytest.approx(np.mean(np.abs(current - mu)))
    assert numbers["policy_drift_signed"] == pytest.approx(np.mean(current - mu))


def test_a_kl_term_without_a_reference_is_refused():
    fields, logprobs, entropy = batch_of()
    inputs = LossInputs(**{**fields, "ref_logprobs": None})
    with pytest.raises(ValueError, match="reference"):
        grpo_loss(logprobs, entropy, SEGMENTS, inputs, Grpo())
    # and without the term none is needed
    assert grpo_loss(logprobs, entropy, SEGMENTS, inputs, Grpo(kl={"coef": 0.0}))[1].kl == 0


SEQUENCE = {"ratio": "sequence", "clip": {"eps_low": 0.05, "eps_high": 0.1, "delta": None}}
CISPO = {"surrogate": "cispo", "clip": {"eps_low": 0.3, "eps_high": 0.6, "delta": None}}
SWITCHES: dict[str, dict[str, Any]] = {
    "the defaults": {},
    "uneven clip with a low delta, token": {
        "clip": {"eps_low": 0.05, "eps_high": 0.6, "delta": 1.7},
        "loss_normalizer": "token",
    },
    "no delta, no KL, constant": {
        "clip": {"delta": None},
        "kl": {"coef": 0.0},
        "loss_normalizer": "constant",
    },
    "strong KL and entropy": {"kl": {"coef": 0.5}, "entropy_coef": 0.3},
    "importance weights": {"importance": {"cap": 1.5}},
    "sequence ratio, strong KL and entropy": {**SEQUENCE, "kl": {"coef": 0.5}, "entropy_coef": 0.3},
    "sequence ratio, second side, token, importance weights": {
        "ratio": "sequence",
        "clip": {"eps_low": 0.01, "eps_high": 0.02, "delta": 1.1},
        "loss_normalizer": "token",
        "importance": {"cap": 1.5},
    },
    "cispo, strong KL and entropy": {**CISPO, "kl": {"coef": 0.5}, "entropy_coef": 0.3},
    "cispo, token, importance weights": {
        **CISPO,
        "loss_normalizer": "token",
        "importance": {"cap": 1.5},
    },
}
Arrays = list[Any]


def batch_and_policy() -> tuple[list[Rollout], Arrays, Arrays]:
    """Rollouts with log pi_theta and entropies, an array a sample, float64: far enough from old to
    be clipped, near enough for sequence ratios around 1."""
    rollouts, rng = make_rollouts(np.random.default_rng(3), 24, 9, 26), np.random.default_rng(4)
    logprobs = [r.old + rng.normal(scale=0.5, size=r.old.shape) for r in rollouts]
    return rollouts, logprobs, [rng.uniform(0.5, 3.0, size=r.old.shape) for r in rollouts]


def packed_loss(
    rollouts: list[Rollout], algorithm: Grpo, *policy: Arrays, dtype: Any = jnp.float64, mesh=None
) -> tuple[Any, dict[str, float], list[Arrays]]:
    """Our loss and metrics, and the gradients by log-probs and by entropies of each sample; no
    other position has one."""
    packed = pack([Sample(r.prompt, r.output) for r in rollouts], tokens=72, rows=4)
    assert packed.microbatches == 1
    inputs, *values = jax.tree.map(
        lambda values: jnp.asarray(values[0], dtype),
        (inputs_of(packed, rollouts, algorithm), *map(packed.scatter, policy)),
    )
    batch = (*values, packed.token_batch(0).segment_ids, inputs)
    if mesh is not None:
        batch = shard_batch(batch, make_mesh(mesh))

    def loss(logprobs: jax.Array, entropy: jax.Array) -> tuple[jax.Array, LossMetrics]:
        return grpo_loss(logprobs, entropy, *batch[2:], algorithm)

    (value, metrics), grads = jax.value_and_grad(loss, (0, 1), has_aux=True)(*batch[:2])
    found = [packed.gather(np.asarray(grad)[None]) for grad in grads]
    for grad, parts in zip(grads, found, strict=True):
        assert np.count_nonzero(grad) == sum(map(np.count_nonzero, parts))
    return value, metrics.means(), found


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES.keys())
def test_gradient_is_that_of_the_formula(switches):
    # given one optimizer batch and an algorithm
    algorithm, batch = Grpo.model_validate(switches), batch_and_policy()
    with jax.enable_x64(True):
        # when differentiated by the plain formula, one sample at a time
        truth, expected = jax.value_and_grad(loss_of_logprobs, (0, 1))(
            batch[1], batch[2], batch[0], algorithm, max_new_tokens=MAX_NEW_TOKENS
        )
        # and packed, in either type
        for dtype, limit in ((jnp.float64, 1e-10), (jnp.float32, 1e-5)):
            value, metrics, found = packed_loss(batch[0], algorithm, *batch[1:], dtype=dtype)
            # then loss and every sample's gradient agree
            assert max(relative_errors(found, list(expected)).values()) <= limit
            assert float(value) == pytest.approx(float(truth), abs=limit)
    # and each bound acts on some token and spares another
    if "clip" in switches and algorithm.kl.coef:
        for side in ["low", "high"] + ["delta"] * (algorithm.clip.delta is not None):
            assert 0 < metrics[f"clip_fraction_{side}"] < 1, side


@pytest.mark.parametrize(
    "switches",
    [
        "strong KL and entropy",
        "sequence ratio, second side, token, importance weights",
        "cispo, strong KL and entropy",
    ],
)
def test_what_stands_between_two_turns_is_context_alone(switches):
    # given rollouts of two turns with an observation between them, hidden states and a head
    algorithm, rng = Grpo.model_validate(SWITCHES[switches]), np.random.default_rng(5)
    vocab, width = 9, 6
    rollouts = make_rollouts(rng, vocab, 8, 26)
    turns = [[1, len(r.output) - 1] for r in rollouts]
    between = [rng.integers(0, vocab, 3) for _ in rollouts]
    whole = [joined(r.output, t, b, [3]) for r, t, b in zip(rollouts, turns, between, strict=True)]
    samples = [Sample(r.prompt, w.tokens, w.own) for r, w in zip(rollouts, whole, strict=True)]
    packed = pack(samples, tokens=72, rows=6)
    assert packed.microbatches == 1
    batch, head = packed.token_batch(0), rng.normal(size=(width, vocab))
    hidden = rng.normal(size=(*batch.tokens.shape, width))

    def formula(hidden: jax.Array, head: jax.Array) -> jax.Array:
        """The masked loss, from the table of all that follows each prompt."""
        logprobs, entropies = [], []
        for place, each in zip(packed.placements, whole, strict=True):
            states = hidden[place.row, place.start : place.start + len(each.tokens)]
            table = jax.nn.log_softmax(states @ head)
            logprobs.append(table[np.arange(len(each.tokens)), each.tokens][each.own])
            entropies.append(-(jnp.exp(table) * table).sum(-1)[each.own])
        return loss_of_logprobs(
            logprobs, entropies, rollouts, algorithm, max_new_tokens=MAX_NEW_TOKENS
        )

    with jax.enable_x64(True):
        inputs = jax.tree.map(lambda x: jnp.asarray(x[0]), inputs_of(packed, rollouts, algorithm))

        def loss(hidden: jax.Array, head: jax.Array) -> tuple[jax.Array, LossMetrics]:
            scores = token_logprobs(hidden, head, batch.targets, temperature=1.0)
            return grpo_loss(*scores, batch.segment_ids, inputs, algorithm)

        # when the packed loss and its formula are differentiated
        arrays = jnp.asarray(hidden), jnp.asarray(head)
        (value, metrics), found = jax.value_and_grad(loss, (0, 1), has_aux=True)(*arrays)
        truth, expected = jax.value_and_grad(formula, (0, 1))(*arrays)
    # then both agree, and only sampled tokens were counted
    assert float(value) == pytest.approx(float(truth), abs=1e-10)
    assert max(relative_errors(list(found), list(expected)).values()) <= 1e-10
    assert int(metrics.tokens) == sum(len(r.output) for r in rollouts)


@pytest.mark.slow
def test_the_sequence_ratio_is_the_same_where_a_mesh_cuts_samples():
    algorithm, batch = Grpo.model_validate(SEQUENCE), batch_and_policy()
    with jax.enable_x64(True):
        (whole, _, ours), (cut, _, found) = (
            packed_loss(batch[0], algorithm, *batch[1:], mesh=mesh)
            for mesh in (None, Mesh(data=2, fsdp=2, context=2))
        )
    assert max(relative_errors([cut, found], [whole, ours]).values()) <= 1e-12


@pytest.mark.slow
def test_the_sequence_ratio_needs_no_scatter_and_memory_of_its_rows_alone():
    # given long rows
    rows, tokens = 2, 4096
    one = jax.ShapeDtypeStruct((rows, tokens), jnp.float32)
    ids = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    loss = jax.grad(partial(grpo_loss, algorithm=Grpo(ratio="sequence")), (0, 1), has_aux=True)
    # when the gradient and all metrics are compiled
    lowered = jax.jit(loss).lower(one, one, ids, LossInputs(one, one, one, one, one))
    # then there is neither scatter nor gather, and 100 numbers a token are enough
    assert "scatter" not in lowered.as_text() and "gather" not in lowered.as_text()
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 100 * 4 * rows * tokens


# -- Log-probs and entropies: the softmax of all logits, and its gradients ---------------------

B, T, D, V = 2, 13, 8, 19


def arrays(*, holes: bool = False) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hidden states, head and targets; with holes, most positions have no target."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, V, (B, T))
    if holes:
        targets[0, :9] = targets[1, ::2] = -1
    return rng.normal(size=(B, T, D)), rng.normal(size=(D, V)), targets


def whole(hidden: Any, head: Any, targets: Any, temperature: float) -> tuple[Any, Any]:
    """The formula on all logits at once."""
    table = jax.nn.log_softmax(hidden @ head / temperature)
    chosen = jnp.take_along_axis(table, jnp.maximum(targets, 0)[..., None], -1)[..., 0]
    entropy = -(jnp.exp(table) * table).sum(-1)
    return jnp.where(targets >= 0, chosen, 0.0), jnp.where(targets >= 0, entropy, 0.0)


def objective(function: Any, hidden: Any, head: Any) -> tuple[jax.Array, Any]:
    """A number that depends on both results in a different way at each position; and both."""
    logprobs, entropy = function(hidden, head)
    return jnp.sum(logprobs * jnp.cos(logprobs) + entropy**2), (logprobs, entropy)


def differentiated(function: Any, hidden: Any, head: Any) -> tuple[Any, Any]:
    """Gradients by hidden states and head; log-probs and entropies."""
    gradient = jax.grad(partial(objective, function), (0, 1), has_aux=True)
    return jax.jit(gradient)(jnp.asarray(hidden), jnp.asarray(head))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunk", "holes", "kept", "temperature"),
    [
        (None, True, True, 0.6),
        (4, True, False, 0.9),
        (13, False, True, 1.0),
        (1, False, False, 0.6),
    ],
)
def test_log_probs_are_those_of_the_whole_softmax(chunk, holes, kept, temperature, monkeypatch):
    # given chunks whose logits are kept for the backward pass, or computed again
    monkeypatch.setattr("learner_jax.logprobs.KEPT_LOGITS", KEPT_LOGITS if kept else 0)
    hidden, head, targets = arrays(holes=holes)
    with jax.enable_x64(True):
        # when differentiated, and differentiated by JAX through the whole table
        found, expected = (
            differentiated(partial(each, targets=targets, temperature=temperature), hidden, head)
            for each in (partial(token_logprobs, chunk=chunk), whole)
        )
    # then values and gradients agree
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) <= 1e-10 * np.linalg.norm(b)


def test_large_logits_keep_their_precision():
    # given logits a thousand apart and two that nearly tie
    logits = np.array([[[1000.0, 999.5, -1000.0]]], np.float32)
    logprobs, entropy = token_logprobs(
        logits, jnp.eye(3, dtype=jnp.float32), np.array([[1]]), temperature=1.0
    )
    # then the common part has cancelled
    share = 1 / (1 + np.exp(0.5))
    np.testing.assert_allclose(logprobs, [[np.log(share)]], rtol=1e-6)
    expected = -share * np.log(share) - (1 - share) * np.log(1 - share)
    np.testing.assert_allclose(entropy, [[expected]], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [True, False])
def test_positions_without_a_target_count_nothing_whatever_is_there(kept, monkeypatch):
    # given logits whose exponential is no float32, at positions that share a chunk with targets
    monkeypatch.setattr("learner_jax.logprobs.KEPT_LOGITS", KEPT_LOGITS if kept else 0)
    hidden, head, targets = (x.astype(np.float32) for x in arrays(holes=True))
    targets = targets.astype(int)
    nowhere = targets < 0
    large = np.where(nowhere[..., None], 1000.0 * hidden, hidden)
    function = partial(token_logprobs, targets=targets, temperature=0.6)
    # when differentiated
    found, expected = (differentiated(function, states, head) for states in (large, hidden))
    # then they add nothing, not even 0 * inf
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    # and they score 0, also where hidden states are not finite
    hidden[nowhere] = np.nan
    for scores in (*found[1], *function(hidden, head)):
        assert not np.asarray(scores)[nowhere].any() and np.isfinite(scores).all()
    # and no target at all is no gradient
    none = partial(token_logprobs, targets=np.full_like(targets, -1), temperature=1.0)
    assert not any(x.any() for x in jax.tree.leaves(differentiated(none, arrays()[0], head)))


@pytest.mark.slow
def test_bfloat16_states_sum_the_gradient_of_the_head_in_float32():
    # given a float32 head used in bfloat16, and many chunks
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(1, 128, D)), jnp.bfloat16)
    targets = rng.integers(0, V, (1, 128))
    head = jnp.asarray(rng.normal(size=(D, V)), jnp.float32)

    def value(head: jax.Array, chunk: int) -> jax.Array:
        return token_logprobs(hidden, head, targets, temperature=1.0, chunk=chunk)[0].sum()

    # when summed over 128 chunks or one
    many, one = (jax.jit(jax.grad(partial(value, chunk=n)))(head) for n in (1, 128))
    # then it is float32 and no more is lost on the way
    assert many.dtype == jnp.float32
    np.testing.assert_allclose(many, one, rtol=0, atol=1e-4 * float(jnp.abs(one).max()))


PAGE = (Path(__file__).parents[2] / "docs" / "learner_jax.md").read_text(encoding="utf-8")
CONFIGURATIONS = dict(re.findall(r"^\| ([\w. -]+) \(\d{4}\.\d{5}\) \| `(\{.*\})` \|$", PAGE, re.M))
PAPERS: dict[str, tuple[Any, ...]] = {
    "INTELLECT-2": ("std", "token", "clip", 0.2, 0.2, 4.0, 1e-3, 1e-4, "sequence"),  # section 4.1
    "GRPO": ("std", "token", "clip", 0.2, 0.2, None, 0.04, 0.0, "sequence"),  # equations 3 and 4
    "DAPO": ("std", "token", "clip", 0.2, 0.28, None, 0.0, 0.0, "token"),  # equation 8
    "Dr. GRPO": ("none", "token", "clip", 0.2, 0.2, None, 0.0, 0.0, "constant"),  # figure 1
    "GSPO": ("std", "sequence", "clip", 3e-4, 4e-4, None, 0.0, 0.0, "sequence"),  # equations 5, 7
    "CISPO": ("std", "token", "cispo", 1.0, 2.0, None, 0.0, 0.0, "token"),  # equations 4 and 5
}
"""Normalisation, ratio, surrogate, bounds of the clip, KL, entropy, normaliser."""


@pytest.mark.parametrize("paper", sorted(PAPERS.keys() | CONFIGURATIONS.keys()))
def test_a_configuration_of_the_page_is_its_papers(paper, tmp_path):
    loaded = load(small_spec(tmp_path), f"algorithm={CONFIGURATIONS[paper]}")
    assert loaded.findings == []
    it = loaded.require().grpo
    found = it.advantage.normalize, it.ratio, it.surrogate, *vars(it.clip).values(), it.kl.coef
    assert (*found, it.entropy_coef, it.loss_normalizer) == PAPERS[paper]
