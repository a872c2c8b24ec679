"""One rollout step: what pi_old is, who trains in which update, and when the run must stop."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import numpy as np
import pytest

from learner_jax.batch import Batch, TrainingRollout
from learner_jax.leaves import HostLeaves, leaf_at
from learner_jax.model import abstract_params, init_lora, init_params
from learner_jax.sharding import make_mesh, shard_params
from learner_jax.step import Accumulated, Programs, build_programs
from learner_jax.training import RolloutName, StepResult, train_step
from learner_jax.warm_start import model_config
from runspec.core.models.config import ModelConfig
from runspec.core.process import RunStopped
from runspec.core.spec.schema import Lora, RunSpec
from tests.learner_jax.conftest import VOCABULARY, changed, tiny_spec, updates_made
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
    manifest = BatchManifest("tiny", 0, named, True, {}, 1, "0" * 64)
    return Batch(manifest, [[rollout(g, s) for s in range(4)] for g in range(groups)])


@cache
def built(spec_json: str) -> tuple[ModelConfig, jax.sharding.Mesh, Programs]:
    spec = RunSpec.model_validate_json(spec_json)
    config, mesh = model_config(spec), make_mesh(spec.learner.mesh)
    return config, mesh, build_programs(spec, config, mesh)


def trained(spec: RunSpec, *batches: Batch) -> StepResult:
    """The result of the last batch, trained after the others."""
    config, mesh, programs = built(spec.model_dump_json(by_alias=True))
    params = shard_params(init_params(config, jax.random.key(0)), abstract_params(config), mesh)
    state = programs.init_state(params)
    base = programs.freeze(params)
    for batch in batches:
        result = train_step(
            spec,
            mesh,
            programs,
            state,
            published=base,
            reference=base,
            batch=batch,
            base=base if spec.learner.lora else None,
        )
        state = result.state
    return result


def spoiled(
    batch: Batch, change: Callable[[TrainingRollout], Any], *which: tuple[int, int]
) -> Batch:
    """The batch with the rollouts (group, sample) changed."""
    groups = [
        [
            replace(rollout, **change(rollout)) if (g, i) in which else rollout
            for i, rollout in enumerate(group)
        ]
        for g, group in enumerate(batch.groups)
    ]
    return replace(batch, groups=groups)


def no_mu(rollout: TrainingRollout) -> Any:
    return {"mu": np.full_like(rollout.mu, np.nan)}


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
    assert updates_made(both.state) == 2
    assert both.numbers["ratio_max"] > 1.0 + 1e-5
    # and the order of the groups decides who is trained in which
    swapped = Batch(batch.manifest, [*batch.groups[2:], *batch.groups[:2]])
    again = trained(spec_with(updates_per_step=2), batch)
    np.testing.assert_array_equal(flat(again), flat(both))
    assert (flat(trained(spec_with(updates_per_step=2), swapped)) != flat(both)).any()


def test_a_step_with_fewer_groups_than_updates_makes_fewer_updates() -> None:
    result = trained(spec_with(updates_per_step=4), batch_of(3))
    assert updates_made(result.state) == 3


def test_one_gradient_lies_in_memory_at_a_time() -> None:
    # given programs that look at the gradients of the updates before
    spec = spec_with(updates_per_step=3)
    config, mesh, programs = built(spec.model_dump_json(by_alias=True))
    gradients: list[weakref.ref[jax.Array]] = []

    def accumulate(*arguments: Any) -> Accumulated:
        assert [each() for each in gradients] == [None] * len(gradients)
        total = programs.accumulate(*arguments)
        gradients.extend(map(weakref.ref, jax.tree.leaves(total.grads)))
        return total

    params = shard_params(init_params(config, jax.random.key(0)), abstract_params(config), mesh)
    # when a step makes three, then they are gone when the next is begun
    train_step(
        spec,
        mesh,
        replace(programs, accumulate=accumulate),
        programs.init_state(params),
        published=params,
        reference=params,
        batch=batch_of(6),
    )
    assert len(gradients) == 3 * len(jax.tree.leaves(params))


def test_an_update_that_is_not_finite_is_skipped_and_its_rollouts_named() -> None:
    # given a step of two updates, a rollout of the second with a log-prob that is not finite
    spec, batch = spec_with(updates_per_step=2, old_logprobs="sampler"), batch_of(4)
    result = trained(spec, spoiled(batch, no_mu, (2, 1)))
    # then the first was made, the second was not, and the rollout is named
    assert (updates_made(result.state), int(result.state.skipped)) == (1, 1)
    assert result.numbers["skipped_updates"] == 1 and np.isfinite(result.numbers["loss"])
    (skipped,) = result.skipped
    assert (skipped.update, skipped.identified) == (1, True)
    assert skipped.rollouts == (RolloutName(SUBMISSION, 2, 1),)
    # and the state is that of the first update alone
    first = trained(spec_with(updates_per_step=1, old_logprobs="sampler"), batch_of(2))
    np.testing.assert_array_equal(flat(result), flat(first))


def test_all_rollouts_are_named_where_no_number_tells() -> None:
    # given advantages whose gradient overflows, though every number of the tokens is finite
    batch = spoiled(batch_of(2), lambda _: {"advantage": 1e30}, (0, 0))
    result = trained(spec_with(), batch)
    (skipped,) = result.skipped
    assert not skipped.identified and len(skipped.rollouts) == 8
    assert np.isnan(result.numbers["loss"]) and np.isnan(result.numbers["grad_norm"])


def test_too_many_skipped_updates_in_a_row_stop_the_run() -> None:
    # given two steps, in which no update is finite, and one may be skipped
    spec = changed(spec_with(old_logprobs="sampler"), optimizer={"max_skipped": 1})
    bad = spoiled(batch_of(2), no_mu, (1, 3))
    # then the first is skipped and the second stops the run, whoever was in between restarted
    assert int(trained(spec, bad).state.skipped) == 1
    with pytest.raises(RunStopped, match=r"2 updates in a row were not finite.*group 1 sample 3"):
        trained(spec, bad, bad)
    # and one that is made in between is enough to go on
    assert int(trained(spec, bad, batch_of(2), bad).state.skipped) == 1


def test_adapters_are_trained_and_the_base_is_not() -> None:
    # given a run that trains adapters on two matrices
    lora = Lora(rank=2, alpha=4.0, targets=["q", "down"])
    spec = changed(spec_with(), learner={"lora": lora})
    result = trained(spec, batch_of(4))
    # then the ratio before the first update is 1: B starts at zero
    assert result.numbers["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    # and of the adapters, all that there is to train, B has moved and A, which B = 0 stops, has not
    draw = jax.jit(partial(init_lora, model_config(spec), lora))
    drawn = draw(jax.random.key(spec.seed))
    trained_leaves = HostLeaves(result.state.params)
    assert len(trained_leaves) == 4
    for path, leaf in trained_leaves.items():
        assert (leaf == leaf_at(drawn, path)).all() == (path[-1] == "a")
