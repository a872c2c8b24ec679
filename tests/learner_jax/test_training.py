"""One rollout step: what pi_old is, who trains in which update, and when the run must stop."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from bridge.config import ModelConfig
from learner_jax.batch import Batch, TrainingRollout
from learner_jax.model import abstract_params, init_params
from learner_jax.sharding import make_mesh, shard_params
from learner_jax.step import build_programs
from learner_jax.training import StepResult, train_step
from learner_jax.warm_start import model_config
from runspec.spec.schema import RunSpec
from tests.learner_jax.conftest import VOCABULARY, tiny_spec
from verify.formats.batch import BatchGroup, BatchManifest

SUBMISSION = "5" * 64


def spec_with(**algorithm: Any) -> RunSpec:
    base = tiny_spec().model_dump(mode="json", by_alias=True)["algorithm"]
    return tiny_spec(algorithm={**base, "updates_per_step": 1, **algorithm})


def batch_of(groups: int, *, mu: float = -3.4) -> Batch:
    rng = np.random.default_rng(0)

    def rollout(group: int, sample: int) -> TrainingRollout:
        length = int(rng.integers(2, 12))
        return TrainingRollout(
            problem_id=f"p{group}",
            prompt_tokens=rng.integers(0, VOCABULARY, 5).astype(np.int32),
            output_tokens=rng.integers(0, VOCABULARY, length).astype(np.int32),
            mu=np.full(length, mu, np.float32),
            advantage=1.0 if sample % 2 else -1.0,
            task_reward=float(sample % 2),
            reward=float(sample % 2),
            target=8,
            version=0,
        )

    named = [BatchGroup(SUBMISSION, "0" * 64, group, 0, 0) for group in range(groups)]
    manifest = BatchManifest("tiny", 0, named, complete=True, stats={})
    return Batch(manifest, [[rollout(g, s) for s in range(4)] for g in range(groups)])


def trained(spec: RunSpec, batch: Batch) -> StepResult:
    config: ModelConfig = model_config(spec)
    mesh = make_mesh(spec.learner.mesh)
    programs = build_programs(spec, config, mesh)
    params = init_params(config, jax.random.key(0))
    state = programs.init_state(shard_params(params, abstract_params(config), mesh))
    published = programs.publish(state.params)
    return train_step(
        spec, mesh, programs, state, published=published, reference=published, batch=batch
    )


def flat(result: StepResult) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.state.params)])


def test_recomputed_pi_old_makes_the_first_ratio_one_and_the_drift_visible() -> None:
    # given rollouts whose mu is far from what the policy says of them
    numbers = trained(spec_with(), batch_of(4, mu=-9.0)).numbers
    # then the ratio hides it, KL to the reference is 0, and the drift tells
    assert numbers["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert numbers["clip_fraction_low"] == numbers["clip_fraction_high"] == 0.0
    assert numbers["kl"] == pytest.approx(0.0, abs=1e-6)
    assert numbers["policy_drift"] > 4.0


def test_pi_old_of_the_sampler_puts_the_distance_into_the_ratio() -> None:
    numbers = trained(spec_with(old_logprobs="sampler"), batch_of(4, mu=-9.0)).numbers
    assert numbers["ratio_max"] > 50.0 and numbers["clip_fraction_high"] > 0.4


def test_updates_take_contiguous_shares_with_pi_old_from_before_the_first() -> None:
    # given a step of two updates
    batch = batch_of(4)
    both = trained(spec_with(updates_per_step=2), batch)
    # then it made two, and in the second pi_theta had moved from the pi_old of the step
    assert int(both.state.updates) == 2
    assert both.numbers["ratio_max"] > 1.0 + 1e-5
    # and the order of the groups decides who is trained in which
    swapped = Batch(batch.manifest, [*batch.groups[2:], *batch.groups[:2]])
    again = trained(spec_with(updates_per_step=2), batch)
    np.testing.assert_array_equal(flat(again), flat(both))
    assert (flat(trained(spec_with(updates_per_step=2), swapped)) != flat(both)).any()


def test_a_step_with_fewer_groups_than_updates_makes_fewer_updates() -> None:
    result = trained(spec_with(updates_per_step=4), batch_of(3))
    assert int(result.state.updates) == 3
