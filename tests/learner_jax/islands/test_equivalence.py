"""Islands of one plain update are one learner, one island is no island, clipping is local."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from bridge.codecs import codec
from bridge.flat import FlatLayout
from learner_jax.batch import Batch
from learner_jax.corpus.rows import CorpusRows
from learner_jax.islands.outer import OuterState, encode_share, outer_update, weighted_mean
from learner_jax.leaves import HostLeaves
from learner_jax.model import abstract_params, init_params
from learner_jax.packing import Sample, pack
from learner_jax.sharding import make_mesh, shard_batch, shard_params
from learner_jax.step import Programs, build_programs, microbatch_bound
from learner_jax.warm_start import model_config
from runspec.core.spec.schema import RunSpec
from tests.learner_jax.conftest import changed
from tests.learner_jax.document_rows import rows_of, supervised_spec
from tests.learner_jax.packed_inputs import inputs_of
from tests.learner_jax.reference import Rollout, make_rollouts
from tests.learner_jax.test_gradients import CONFIG as DOCUMENT_CONFIG
from tests.learner_jax.test_gradients import params_of
from tests.learner_jax.test_supervised import documents_of, stepped
from tests.learner_jax.test_training import batch_of, spec_with, trained

TOLERANCE = {"float32": 1e-6, "float64": 1e-12}
NORMALIZERS = ["sequence", "token", "constant"]
PLAIN = {"kind": "sgd", "momentum": 0.0, "clip_norm": 1e9}
"""An inner update that is linear in the gradient."""


@dataclass(frozen=True)
class Outer:
    """Takes the mean of the islands' parameters."""

    lr: float = 1.0
    momentum: float = 0.0
    nesterov: bool = True


def averaged(
    theta: np.ndarray, islands: Sequence[np.ndarray], weights: Sequence[float]
) -> np.ndarray:
    """The outer parameters after a step that began at theta; the islands' own are [n] each."""
    gradient = weighted_mean((theta - own for own in islands), weights)
    return outer_update(OuterState.initial(theta), gradient, Outer()).theta


def assert_equal_updates(
    theta: np.ndarray, found: np.ndarray, expected: np.ndarray, dtype: str
) -> None:
    moved = np.linalg.norm(expected - theta)
    assert moved > 0.1 * np.linalg.norm(theta)
    assert np.linalg.norm(found - expected) < TOLERANCE[dtype] * moved


def rollout_spec(normalizer: str, **optimizer: Any) -> RunSpec:
    spec = spec_with(loss_normalizer=normalizer)
    return changed(spec, optimizer={**PLAIN, "lr": 20.0, **optimizer})


def groups_of(batch: Batch, part: slice) -> Batch:
    manifest = replace(batch.manifest, groups=batch.manifest.groups[part])
    return replace(batch, manifest=manifest, groups=batch.groups[part])


def weight_of(batch: Batch, normalizer: str) -> float:
    """The denominator of the loss."""
    lengths = [len(rollout.output_tokens) for rollout in batch.rollouts]
    return float(sum(lengths) if normalizer == "token" else len(lengths))


def stepped_rollouts(spec: RunSpec, batch: Batch) -> np.ndarray:
    """The parameters after a step from the initial ones, [n]."""
    params = trained(spec, batch).state.params
    return FlatLayout(model_config(spec)).flatten(HostLeaves(params))


def initial(spec: RunSpec) -> np.ndarray:
    config = model_config(spec)
    return FlatLayout(config).flatten(HostLeaves(init_params(config, jax.random.key(0))))


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_islands_of_rollouts_are_one_data_parallel_learner(normalizer: str) -> None:
    # given a step of four groups, of which one island has one and another has three
    spec, whole = rollout_spec(normalizer), batch_of(4)
    parts = [groups_of(whole, part) for part in (slice(0, 1), slice(1, 4))]
    # when each makes a step, and one learner makes it with all groups
    theta, expected = initial(spec), stepped_rollouts(spec, whole)
    islands = [stepped_rollouts(spec, part) for part in parts]
    found = averaged(theta, islands, [weight_of(part, normalizer) for part in parts])
    # then both make the same update, and with another weighting they would not
    assert_equal_updates(theta, found, expected, "float32")
    with pytest.raises(AssertionError):
        assert_equal_updates(theta, averaged(theta, islands, [1, 1]), expected, "float32")


@cache
def programs64() -> tuple[RunSpec, Mesh, Programs]:
    """Those of every normaliser: it is in the weights alone."""
    spec = changed(
        rollout_spec("sequence", lr=5.0),
        learner={"compute_dtype": "float64", "master_dtype": "float64"},
        broadcast={"dtype": "float64"},
    )
    mesh = make_mesh(spec.learner.mesh)
    return spec, mesh, build_programs(spec, DOCUMENT_CONFIG, mesh)


def updated64(rollouts: list[Rollout], normalizer: str) -> np.ndarray:
    """The parameters after one update in float64, by the jitted programs, [n]."""
    spec, mesh, programs = programs64()
    params = shard_params(params_of("float64"), abstract_params(DOCUMENT_CONFIG), mesh)
    state = programs.init_state(params)
    packed = pack(
        [Sample(rollout.prompt, rollout.output) for rollout in rollouts],
        tokens=spec.learner.packing.tokens,
        rows=spec.learner.packing.rows,
        shards=2,
        microbatches=microbatch_bound(spec),
    )
    inputs = inputs_of(packed, rollouts, rollout_spec(normalizer).grpo)
    tokens, inputs = shard_batch((packed.batch, inputs), mesh)
    total = programs.accumulate(state.params, tokens, inputs, packed.microbatches)
    state, _ = programs.apply(state, total)
    return FlatLayout(DOCUMENT_CONFIG).flatten(HostLeaves(state.params), np.float64)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_islands_of_rollouts_are_one_data_parallel_learner_in_float64(normalizer: str) -> None:
    # given ten rollouts, of which one island has three
    rollouts = make_rollouts(np.random.default_rng(0), DOCUMENT_CONFIG.vocab_size, 10, longest=30)
    parts = [rollouts[:3], rollouts[3:]]
    weights = [
        float(sum(len(r.output) for r in part) if normalizer == "token" else len(part))
        for part in parts
    ]
    # when they make an update together, and one learner makes it
    with jax.enable_x64(True):
        theta = FlatLayout(DOCUMENT_CONFIG).flatten(HostLeaves(params_of("float64")), np.float64)
        expected = updated64(rollouts, normalizer)
        found = averaged(theta, [updated64(part, normalizer) for part in parts], weights)
    # then it is the same
    assert_equal_updates(theta, found, expected, "float64")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_islands_of_documents_are_one_data_parallel_learner(dtype: str) -> None:
    # given two islands' documents, unequally many, some of which weigh four times as much
    spec = supervised_spec(dtype=dtype, optimizer={**PLAIN, "lr": 2.0})
    documents, weights = documents_of(), [4.0 if number % 5 == 0 else 1.0 for number in range(12)]
    whole, *parts = (
        rows_of(spec, documents[part], weights[part])
        for part in (slice(None), slice(0, 3), slice(3, None))
    )
    layout = FlatLayout(DOCUMENT_CONFIG)
    with jax.enable_x64(dtype == "float64"):
        params = params_of(dtype)

        def stepped_rows(rows: CorpusRows) -> np.ndarray:
            state = stepped(spec, rows, params=params).state
            return layout.flatten(HostLeaves(state.params), dtype)

        # when each makes a step, and one learner makes it with all documents
        theta = layout.flatten(HostLeaves(params), dtype)
        expected = stepped_rows(whole)
        islands = [stepped_rows(part) for part in parts]
    found = averaged(theta, islands, [float(part.weights.sum()) for part in parts])
    # then both make the same update
    assert_equal_updates(theta, found, expected, dtype)


def test_one_island_is_no_island_to_one_ulp() -> None:
    # given a step by AdamW with clipping
    spec = changed(spec_with(), optimizer={"lr": 1e-2})
    theta, expected = initial(spec), stepped_rollouts(spec, batch_of(4))
    assert (theta != expected).mean() > 0.9
    # when its share is encoded as float32 and averaged with no other
    data, _, _ = encode_share(codec("float32"), theta - expected, None)
    share = codec("float32").decode(data, len(theta))
    gradient = weighted_mean([share], [16.0])
    found = outer_update(OuterState.initial(theta), gradient, Outer()).theta
    # then each parameter is at most one ulp away, of the larger of its values
    ulp = np.spacing(np.maximum(np.abs(theta), np.abs(expected)))
    assert (np.abs(found - expected) <= ulp).all()


def test_each_island_clips_its_own_gradient() -> None:
    # given a bound far below any gradient's norm
    lr, clip_norm = 50.0, 1e-2
    free = rollout_spec("sequence")
    spec, whole = rollout_spec("sequence", lr=lr, clip_norm=clip_norm), batch_of(4)
    parts = [groups_of(whole, part) for part in (slice(0, 1), slice(1, 4))]
    theta = initial(spec)
    # when islands and one learner make a step
    islands = [stepped_rollouts(spec, part) - theta for part in parts]
    gradients = [(theta - stepped_rollouts(free, part)) / free.optimizer.lr for part in parts]
    together = stepped_rollouts(spec, whole) - theta
    # then each moved against its own gradient, by all that the bound allows
    for own, gradient in zip(islands, gradients, strict=True):
        norm = np.linalg.norm(gradient)
        assert norm > 5 * clip_norm
        expected = -lr * clip_norm / norm * gradient
        assert np.linalg.norm(own - expected) < 1e-3 * np.linalg.norm(expected)
    # and their mean is shorter than the update of one learner, which clips the mean
    mean = averaged(theta, [theta + own for own in islands], [4.0, 12.0]) - theta
    assert np.linalg.norm(together) == pytest.approx(lr * clip_norm, rel=1e-3)
    assert np.linalg.norm(mean) < 0.98 * np.linalg.norm(together)
