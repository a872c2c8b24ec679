"""Every switch of the loss, and pairs of them, against the plain float64 reference."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.loss import clip_surrogate, grpo_loss
from learner_jax.packing import LossInputs, Packed, Sample, pack
from learner_jax.sharding import make_mesh, shard_batch
from runspec.core.spec.schema import Clip, Grpo, Mesh
from tests.learner_jax.packed_inputs import inputs_of
from tests.learner_jax.reference import (
    MAX_NEW_TOKENS,
    Rollout,
    clipped_gain,
    loss_of_logprobs,
    make_rollouts,
    relative_errors,
)

VOCABULARY = 24
NO_DELTA = {"delta": None}
SEQUENCE = {"ratio": "sequence", "clip": {"eps_low": 0.05, "eps_high": 0.1, "delta": None}}
CISPO = {"surrogate": "cispo", "clip": {"eps_low": 0.3, "eps_high": 0.6, "delta": None}}
SWITCHES: dict[str, dict[str, Any]] = {
    "the paper": {},
    "token normaliser": {"loss_normalizer": "token"},
    "constant normaliser": {"loss_normalizer": "constant"},
    "no KL": {"kl": {"coef": 0.0}},
    "strong KL": {"kl": {"coef": 0.5}},
    "strong entropy": {"entropy_coef": 0.3},
    "importance weights": {"importance": {"cap": 1.5}},
    "uneven clip": {"clip": {"eps_low": 0.05, "eps_high": 0.6, "delta": 1.7}},
    "no delta": {"clip": NO_DELTA},
    "no delta, uneven clip, token normaliser": {
        "clip": {"eps_low": 0.2, "eps_high": 0.28, "delta": None},
        "loss_normalizer": "token",
    },
    "sequence ratio": {"ratio": "sequence"},
    "sequence ratio that clips": SEQUENCE,
    "sequence ratio, second side": {
        "ratio": "sequence",
        "clip": {"eps_low": 0.01, "eps_high": 0.02, "delta": 1.1},
    },
    "sequence ratio, token normaliser": {**SEQUENCE, "loss_normalizer": "token"},
    "sequence ratio, importance weights": {**SEQUENCE, "importance": {"cap": 1.5}},
    "sequence ratio, strong KL and entropy": {
        **SEQUENCE,
        "kl": {"coef": 0.5},
        "entropy_coef": 0.3,
    },
    "cispo": CISPO,
    "cispo without a lower bound": {**CISPO, "clip": {"eps_low": 1.0, "eps_high": 2.0, **NO_DELTA}},
    "cispo, token normaliser": {**CISPO, "loss_normalizer": "token"},
    "cispo, importance weights": {**CISPO, "importance": {"cap": 1.5}},
    "cispo, strong KL and entropy": {**CISPO, "kl": {"coef": 0.5}, "entropy_coef": 0.3},
}


@pytest.fixture(scope="module")
def rollouts() -> list[Rollout]:
    return make_rollouts(np.random.default_rng(3), VOCABULARY, count=9, longest=26)


def current_of(rollouts: list[Rollout]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """log pi_theta and entropies, one array a sample, float64: far enough from old to be clipped,
    near enough for sequence ratios around 1."""
    rng = np.random.default_rng(4)
    logprobs = [r.old + rng.normal(scale=0.5, size=r.old.shape) for r in rollouts]
    return logprobs, [rng.uniform(0.5, 3.0, size=r.old.shape) for r in rollouts]


def packed_of(rollouts: list[Rollout]) -> Packed:
    """One microbatch of four rows, several samples in most of them."""
    packed = pack([Sample(r.prompt, r.output) for r in rollouts], tokens=72, rows=4)
    assert packed.microbatches == 1
    return packed


def first_inputs(packed: Packed, rollouts: list[Rollout], algorithm: Grpo) -> LossInputs:
    """Those of the one microbatch."""
    return jax.tree.map(lambda x: x[0], inputs_of(packed, rollouts, algorithm))


@partial(jax.jit, static_argnames="algorithm")
def gradient(
    logprobs: Any, entropy: Any, segment_ids: Any, inputs: LossInputs, algorithm: Grpo
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """The loss of one microbatch and its gradient in log-probs and entropies."""

    def loss(logprobs: Any, entropy: Any) -> jax.Array:
        return grpo_loss(logprobs, entropy, segment_ids, inputs, algorithm)[0]

    return jax.value_and_grad(loss, (0, 1))(logprobs, entropy)


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES.keys())
def test_gradient_is_that_of_the_formula(switches: dict[str, Any], rollouts: list[Rollout]) -> None:
    # given one optimizer batch, packed, and an algorithm
    algorithm, packed = Grpo.model_validate(switches), packed_of(rollouts)
    logprobs, entropies = current_of(rollouts)
    segments = packed.token_batch(0).segment_ids
    inputs = first_inputs(packed, rollouts, algorithm)
    arrays = (packed.scatter(logprobs)[0], packed.scatter(entropies)[0], inputs)
    # when differentiated by the plain formula, one sample at a time
    with jax.enable_x64(True):
        truth, expected = jax.value_and_grad(loss_of_logprobs, (0, 1))(
            logprobs, entropies, rollouts, algorithm, max_new_tokens=MAX_NEW_TOKENS
        )
        # and packed, in either type
        for dtype, limit in ((jnp.float64, 1e-10), (jnp.float32, 1e-5)):
            current, entropy, part = jax.tree.map(partial(jnp.asarray, dtype=dtype), arrays)
            value, grads = gradient(current, entropy, segments, part, algorithm)
            found = [packed.gather(np.asarray(grad)[None]) for grad in grads]
            # then every sample's gradient agrees, and no other position has one
            assert max(relative_errors(found, list(expected)).values()) <= limit
            assert float(value) == pytest.approx(float(truth), abs=limit)
            for grad, parts in zip(grads, found, strict=True):
                assert np.count_nonzero(grad) == sum(map(np.count_nonzero, parts))


def test_the_batch_reaches_every_bound(rollouts: list[Rollout]) -> None:
    # given the batch above, then each bound acts on some token and spares another
    packed, (logprobs, entropies) = packed_of(rollouts), current_of(rollouts)
    arrays = packed.scatter(logprobs)[0], packed.scatter(entropies)[0]
    segments = packed.token_batch(0).segment_ids
    second_side = SWITCHES["sequence ratio, second side"]
    metrics_of = jax.jit(grpo_loss, static_argnames="algorithm")
    for switches in ({"clip": {"delta": 1.5}}, SEQUENCE, second_side, CISPO):
        algorithm = Grpo.model_validate(switches)
        inputs = first_inputs(packed, rollouts, algorithm)
        numbers = metrics_of(*arrays, segments, inputs, algorithm=algorithm)[1].means()
        for side in ["low", "high"] + ["delta"] * (algorithm.clip.delta is not None):
            assert 0 < numbers[f"clip_fraction_{side}"] < 1, (switches, side)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize("delta", [None, 4.0])
def test_ties_are_split_as_in_the_formula(advantage: float, delta: float | None) -> None:
    # given ratios exactly at 1, where recomputed log-probs begin, and exactly at each bound
    clip = Clip(eps_low=0.25, eps_high=0.25, delta=delta)
    bounds = [0.75, 1.0, 1.25, 4.0]

    def formula(ratio: jax.Array) -> jax.Array:
        return clipped_gain(ratio, advantage, clip)

    # when, then
    found = [float(jax.grad(clip_surrogate)(bound, advantage, clip)) for bound in bounds]
    assert found == [float(jax.grad(formula)(bound)) for bound in bounds]
    # and at 1 the gradient is that of the plain policy gradient
    assert found[1] == advantage


@pytest.mark.parametrize(
    "mesh", [{"context": 2}, {"data": 2, "fsdp": 2, "context": 2}, {"fsdp": 2, "tensor": 2}]
)
def test_the_sequence_ratio_is_the_same_on_every_mesh(
    mesh: dict[str, int], rollouts: list[Rollout]
) -> None:
    # given rows cut over devices in the middle of samples
    algorithm, packed = Grpo.model_validate(SEQUENCE), packed_of(rollouts)
    segments = packed.token_batch(0).segment_ids
    with jax.enable_x64(True):
        batch = (
            *(packed.scatter(values)[0] for values in current_of(rollouts)),
            segments,
            first_inputs(packed, rollouts, algorithm),
        )
        whole = jax.tree.leaves(gradient(*batch, algorithm))
        # when differentiated there
        on_mesh = shard_batch(batch, make_mesh(Mesh(**mesh)))
        cut = jax.tree.leaves(gradient(*on_mesh, algorithm))
    # then loss and gradients are those of one device
    assert max(relative_errors(cut, whole).values()) <= 1e-12


def test_the_sequence_ratio_needs_no_scatter_and_memory_of_its_rows_alone() -> None:
    # given long rows
    rows, tokens = 2, 4096
    one = jax.ShapeDtypeStruct((rows, tokens), jnp.float32)
    ids = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)

    @partial(jax.jit, static_argnames="algorithm")
    def with_metrics(
        logprobs: Any, entropy: Any, ids: Any, inputs: LossInputs, algorithm: Grpo
    ) -> Any:
        return jax.grad(grpo_loss, (0, 1), has_aux=True)(logprobs, entropy, ids, inputs, algorithm)

    # when the gradient and all metrics are compiled
    lowered = with_metrics.lower(
        one, one, ids, LossInputs(one, one, one, one, one), algorithm=Grpo(ratio="sequence")
    )
    # then there is neither scatter nor gather, and 100 numbers a token are enough
    assert "scatter" not in lowered.as_text() and "gather" not in lowered.as_text()
    assert lowered.compile().memory_analysis().temp_size_in_bytes < 100 * 4 * rows * tokens
