"""One rollout step: what pi_old is, who trains in which update, when the run must stop.

And the chain of optax's transformations: kinds, schedules, skipped updates, moments, masters.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from learner_jax.batch import Batch, TrainingRollout
from learner_jax.leaves import HostLeaves, leaf_at
from learner_jax.model import abstract_params, init_lora, init_params
from learner_jax.optimizer import (
    HOST_MEMORY,
    abstract_state,
    apply_gradients,
    build_optimizer,
    init_state,
    learning_rate,
)
from learner_jax.sharding import logical_sharding, make_mesh, shard_params
from learner_jax.step import Accumulated, Programs, TrainState, build_programs
from learner_jax.training import StepResult, train_step
from learner_jax.warm_start import model_config
from runspec.core.models import ModelConfig
from runspec.core.models.parameters import Parameter
from runspec.core.process import RunStopped
from runspec.core.schema import Lora, Mesh, Optimizer, RunSpec
from tests.learner_jax.conftest import VOCABULARY, changed, tiny_spec, updates_made
from verify.formats.batch import BatchGroup, BatchManifest

pytestmark = pytest.mark.slow

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


def begun(spec: RunSpec) -> tuple[jax.sharding.Mesh, Programs, TrainState, Any]:
    """Mesh and programs of a run, its first state, and version 0's bits."""
    config, mesh, programs = built(spec.model_dump_json(by_alias=True))
    params = shard_params(init_params(config, jax.random.key(0)), abstract_params(config), mesh)
    return mesh, programs, programs.init_state(params), programs.freeze(params)


def trained(
    spec: RunSpec,
    *batches: Batch,
    wrap: Callable[[Programs], Programs] = lambda programs: programs,
    read: Callable[[TrainState, Any], Any] = lambda state, base: base,
) -> StepResult:
    """The result of the last batch, trained after the others.

    Args:
        spec: of the run.
        batches: one a step.
        wrap: of the programs.
        read: gives the bits under which pi_old is computed, from state and version 0.
    """
    mesh, programs, state, base = begun(spec)
    for batch in batches:
        result = train_step(
            spec,
            mesh,
            wrap(programs),
            state,
            published=read(state, base),
            reference=base,
            batch=batch,
            base=base if spec.learner.lora else None,
        )
        state = result.state
    return result


def spoiled(batch: Batch, group: int, sample: int, **change: Any) -> Batch:
    """The batch with fields of a rollout replaced."""
    groups = [list(rollouts) for rollouts in batch.groups]
    groups[group][sample] = replace(groups[group][sample], **change)
    return replace(batch, groups=groups)


def without_mu(batch: Batch, group: int, sample: int) -> Batch:
    mu = np.full_like(batch.groups[group][sample].mu, np.nan)
    return spoiled(batch, group, sample, mu=mu)


def flat(result: StepResult) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(result.state.params)])


RECOMPUTED, SAMPLERS = spec_with(updates_per_step=2), spec_with(old_logprobs="sampler")


def narrow(published: str, compute: str) -> RunSpec:
    return changed(RECOMPUTED, broadcast={"dtype": published}, learner={"compute_dtype": compute})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_ratio_before_the_first_update_is_one(dtype):
    # given one group, so one update, whose mu is far from what the policy says of it
    numbers = trained(narrow(dtype, dtype), batch_of(1, mu=-9.0)).numbers
    # then recomputing pi_old hides it, KL to the reference is 0, and the drift tells
    assert numbers["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert numbers["clip_fraction_low"] == numbers["clip_fraction_high"] == 0.0
    assert numbers["kl"] == pytest.approx(0.0, abs=1e-6)
    assert numbers["policy_drift"] > 4.0


def test_a_policy_version_is_its_published_bits():
    # given a policy that is published in bfloat16 and computed in float32
    def numbers(read: Callable[[TrainState, Any], Any]) -> dict[str, float]:
        return trained(narrow("bfloat16", "float32"), batch_of(1), read=read).numbers

    def widened(state: TrainState, base: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype("float32"), base)

    # when pi_old is that of its bits, of the same bits widened by hand, and of the masters
    bits, wide, masters = (
        numbers(read)
        for read in (lambda state, base: base, widened, lambda state, base: state.params)
    )
    # then it is the bits', which the masters differ from
    assert bits == wide
    assert bits["ratio_max"] > 1 + 1e-5 > masters["ratio_max"]


def test_pi_old_of_the_sampler_puts_the_distance_into_the_ratio():
    numbers = trained(SAMPLERS, batch_of(4, mu=-9.0)).numbers
    assert numbers["ratio_max"] > 50.0 and numbers["clip_fraction_high"] > 0.4


def test_updates_take_contiguous_shares_with_pi_old_from_before_the_first():
    # given a step of two updates
    batch = batch_of(4)
    both = trained(RECOMPUTED, batch)
    # then it made two, and in the second pi_theta had moved from the pi_old of the step
    assert updates_made(both.state) == 2
    assert both.numbers["ratio_max"] > 1.0 + 1e-5
    # and the order of the groups decides who is trained in which
    swapped = Batch(batch.manifest, [*batch.groups[2:], *batch.groups[:2]])
    np.testing.assert_array_equal(flat(trained(RECOMPUTED, batch)), flat(both))
    assert (flat(trained(RECOMPUTED, swapped)) != flat(both)).any()
    # and with fewer groups than updates it makes fewer
    assert updates_made(trained(RECOMPUTED, batch_of(1)).state) == 1


def test_one_gradient_lies_in_memory_at_a_time_and_its_norm_is_told():
    # given programs that look at the gradients of the updates before
    gradients: list[weakref.ref[jax.Array]] = []
    norms = []

    def looking(programs: Programs) -> Programs:
        def accumulate(*arguments: Any) -> Accumulated:
            assert [each() for each in gradients] == [None] * len(gradients)
            total = programs.accumulate(*arguments)
            norms.append(float(optax.tree.norm(total.grads)))
            gradients.extend(map(weakref.ref, jax.tree.leaves(total.grads)))
            return total

        return replace(programs, accumulate=accumulate)

    # when a step makes two, then the first's are gone when the second is begun
    result = trained(RECOMPUTED, batch_of(4), wrap=looking)
    assert len(gradients) == 2 * len(jax.tree.leaves(result.state.params))
    # and the norm is that before clipping
    assert min(norms) > RECOMPUTED.optimizer.clip_norm
    assert result.numbers["grad_norm"] == pytest.approx(np.mean(norms), rel=1e-5)


def test_an_update_that_is_not_finite_is_skipped_and_its_rollouts_named():
    # given a step of two updates, a rollout of the second with a log-prob that is not finite
    spec = spec_with(updates_per_step=2, old_logprobs="sampler")
    result = trained(spec, without_mu(batch_of(4), 2, 1))
    # then the first was made, the second was not, and the rollout is named
    assert (updates_made(result.state), int(result.state.skipped)) == (1, 1)
    assert result.numbers["skipped_updates"] == 1 and np.isfinite(result.numbers["loss"])
    (skipped,) = result.skipped
    assert (skipped.update, skipped.identified) == (1, True)
    assert skipped.names == (f"{SUBMISSION[:16]} group 2 sample 1",)
    # and the state is that of the first update alone
    first = replace(batch_of(4), groups=batch_of(4).groups[:2])
    np.testing.assert_array_equal(flat(result), flat(trained(SAMPLERS, first)))


def test_all_rollouts_are_named_where_no_number_tells():
    # given advantages whose gradient overflows, though every number of the tokens is finite
    result = trained(SAMPLERS, spoiled(batch_of(3), 0, 0, advantage=1e30))
    (skipped,) = result.skipped
    assert not skipped.identified and len(skipped.names) == 12
    assert "sample 3; " in str(skipped) and str(skipped).endswith("sample 3 and 4 more")
    assert np.isnan(result.numbers["loss"]) and np.isnan(result.numbers["grad_norm"])


def test_too_many_skipped_updates_in_a_row_stop_the_run():
    # given two steps, in which no update is finite, and one may be skipped
    spec = changed(SAMPLERS, optimizer={"max_skipped": 1})
    bad = without_mu(batch_of(2), 1, 3)
    # then the first is skipped and the second stops the run, whoever was in between restarted
    assert int(trained(spec, bad).state.skipped) == 1
    with pytest.raises(RunStopped, match=r"2 updates in a row were not finite.*group 1 sample 3"):
        trained(spec, bad, bad)
    # and one that is made in between is enough to go on
    assert int(trained(spec, bad, batch_of(2), bad).state.skipped) == 1


def test_adapters_are_trained_and_the_base_is_not():
    # given a run that trains bfloat16 adapters on two matrices
    lora = Lora(rank=2, alpha=4.0, targets=["q", "down"])
    spec = changed(spec_with(), learner={"lora": lora, "master_dtype": "bfloat16"})
    result = trained(spec, batch_of(4))
    # then the ratio before the first update is 1: B starts at zero
    assert result.numbers["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    # and of the adapters, all that there is to train, B has moved and A, which B = 0 stops, has not
    drawn = jax.jit(partial(init_lora, model_config(spec), lora))(jax.random.key(spec.seed))
    leaves = HostLeaves(result.state.params)
    assert len(leaves) == 4
    for path, leaf in leaves.items():
        assert (leaf == leaf_at(drawn, path).astype(leaf.dtype)).all() == (path[-1] == "a")
    moments = [leaf for leaf in jax.tree.leaves(result.state.optimizer) if leaf.ndim]
    assert {str(leaf.dtype) for _, leaf in leaves.items()} == {"bfloat16"}
    assert {str(leaf.dtype) for leaf in moments} == {"float32"}
    # and what is published is the base, in those matrices merged
    _, programs, _, base = begun(spec)
    merged = HostLeaves(programs.publish(result.state.params, base))
    moved = {path[2] for path, leaf in merged.items() if np.any(leaf != leaf_at(base, path))}
    assert moved == {"q", "down"}


SETTINGS: dict[str, Any] = {
    "lr": 0.1,
    "betas": (0.8, 0.9),
    "eps": 1e-3,
    "momentum": 0.7,
    "weight_decay": 0.2,
    "clip_norm": 1.0,
    "warmup_updates": 2,
}
SHAPES: dict[str, Any] = {
    "embed": ("vocab", "embed"),
    "layers": {
        "gate": ("layers", "embed", "mlp"),
        "o": ("layers", "heads", "head_dim", "embed"),
        "mlp_norm": ("layers", "norm"),
    },
    "final_norm": ("norm",),
}
INPUTS = {"gate": 1, "o": 2}
"""Contracted dimensions of the matrices."""
KINDS = ["adamw", "sgd", "muon"]
SIZES = {"vocab": 12, "embed": 8, "layers": 6, "mlp": 10, "norm": 7, "heads": 2, "head_dim": 4}


def settings_of(kind: str, **changes: Any) -> Optimizer:
    return Optimizer.model_validate({**SETTINGS, "kind": kind, **changes})


def described(shapes: dict[str, Any] = SHAPES) -> dict[str, Any]:
    """The tree of `Parameter`."""
    return {
        name: described(axes)
        if isinstance(axes, dict)
        else Parameter(tuple(SIZES[axis] for axis in axes), axes, inputs=INPUTS.get(name))
        for name, axes in shapes.items()
    }


FUSED = {"xla_cpu_use_fusion_emitters": True}
"""As users compile, unlike other tests: muon's iterations enlarge differences in rounding."""


def updated(spec: Optimizer, params: Any, gradients: list[Any], state: Any = None) -> Any:
    """(parameters, state) after an update with each of the gradients."""
    optimizer = build_optimizer(spec, 10, described())
    state = init_state(optimizer, params) if state is None else state

    @partial(jax.jit, compiler_options=FUSED)
    def one(params: Any, state: Any, grads: Any) -> Any:
        made = jnp.isfinite(optax.tree.norm(grads))
        return apply_gradients(optimizer, params, state, grads, made=made)

    for grads in gradients:
        params, state = one(params, state, grads)
    return params, state


def random_trees(count: int) -> list[Any]:
    rng = np.random.default_rng(0)

    def draw(axes: tuple[str, ...]) -> jax.Array:
        return jnp.asarray(rng.normal(size=[SIZES[axis] for axis in axes]), jnp.float32)

    return [
        jax.tree.map(draw, SHAPES, is_leaf=lambda node: isinstance(node, tuple))
        for _ in range(count)
    ]


def on_mesh(tree: Any, shape: Mesh) -> Any:
    mesh = make_mesh(shape)
    return jax.tree.map(
        lambda x, axes: jax.device_put(x, logical_sharding(mesh, x.shape, axes)), tree, SHAPES
    )


def rate(n: jax.Array) -> jax.Array:
    """The learning rate of `SETTINGS`."""
    return 0.1 * jnp.minimum(1.0, (n + 1) / 2)


PLAIN = {
    "adamw": optax.adamw(rate, 0.8, 0.9, eps=1e-3, weight_decay=0.2),
    "sgd": optax.chain(
        optax.trace(0.7, nesterov=True),
        optax.add_decayed_weights(0.2),
        optax.scale_by_learning_rate(rate),
    ),
    "muon": optax.contrib.muon(rate, beta=0.7, eps=1e-3, weight_decay=0.2, consistent_rms=0.2),
}
"""The same settings, written with optax alone."""


def after(kind: str, params: Any, gradients: list[Any]) -> Any:
    """What optax makes of the parameters."""
    expected, state = params, PLAIN[kind].init(params)
    for grads in gradients:
        changes, state = PLAIN[kind].update(grads, state, expected)
        expected = optax.apply_updates(expected, changes)
    return expected


def assert_near(found: Any, expected: Any, rtol: float, atol: float) -> None:
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), found, expected
    )


def clipped(grads: Any) -> Any:
    return optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_updates_are_those_of_plain_optax(kind):
    # given gradients above and below the clip
    params, *gradients = random_trees(4)
    gradients[1] = jax.tree.map(lambda g: 0.01 * g, gradients[1])
    expected = after(kind, params, [clipped(grads) for grads in gradients])
    assert_near(updated(settings_of(kind), params, gradients)[0], expected, 2e-6, 1e-8)


def test_muon_is_that_of_optax_on_each_layers_matrix():
    # given optax's own on matrices that are not stacked, gradients clipped by the norm of all
    params, *gradients = random_trees(3)
    gradients = [clipped(grads) for grads in gradients]

    def unstacked(tree: Any) -> Any:
        layers = range(SIZES["layers"])
        gates = {f"gate{i}": tree["layers"]["gate"][i] for i in layers}
        outputs = {f"o{i}": tree["layers"]["o"][i].reshape(8, 8) for i in layers}
        return gates | outputs

    expected = after("muon", unstacked(params), [unstacked(grads) for grads in gradients])
    # when ours updates the stacked tree, cut over a mesh
    mesh = Mesh(fsdp=4, tensor=2)
    placed = on_mesh(params, mesh)
    found, _ = updated(settings_of("muon"), placed, [on_mesh(grads, mesh) for grads in gradients])
    # then matrices are equal, and all else is as with adamw
    assert_near(unstacked(found), expected, 1e-5, 1e-6)
    plainly = after("adamw", params, gradients)
    for tree in (found, plainly):
        tree["mlp_norm"] = tree.pop("layers")["mlp_norm"]
    assert_near(found, plainly, 1e-5, 1e-7)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]),
        ("linear", [1, 2, 3, 4, 4, 3, 2, 2, 2, 2]),
        ("cosine", [1, 2, 3, 4, 4, 3, 2, 2, 2, 2]),
        ("wsd", [1, 2, 3, 4, 4, 4, 4, 4, 4, 3]),
    ],
)
def test_the_learning_rate_warms_up_then_follows_its_schedule(schedule, expected):
    decay = {} if schedule == "constant" else {"decay_updates": 2, "final_lr": 2.0}
    spec = Optimizer.model_validate({"lr": 4.0, "warmup_updates": 4, "schedule": schedule, **decay})
    found = learning_rate(spec, 10)
    assert [float(found(jnp.int32(n))) for n in range(10)] == pytest.approx(expected)
    # and without a warm-up the first update has the whole rate, and a changed one rises anew
    assert float(learning_rate(Optimizer(lr=4.0), 10)(jnp.int32(0))) == 4.0
    risen = learning_rate(Optimizer(lr=4.0), 10, (4, 4))
    assert [float(risen(jnp.int32(n))) for n in range(3, 9)] == [1, 1, 2, 3, 4, 4]


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_that_is_not_made_changes_no_bit(kind):
    params, good, bad = random_trees(3)
    params["embed"] = params["embed"].at[0, 0].set(-0.0)
    good["embed"] = good["embed"].at[0, 0].set(0.0)
    bad["embed"] = bad["embed"].at[0, 1].set(jnp.nan)
    once = updated(settings_of(kind), params, [good])
    twice = updated(settings_of(kind), once[0], [bad], once[1])
    for a, b in zip(jax.tree.leaves(once), jax.tree.leaves(twice), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_moments_on_the_host_make_the_same_updates(kind):
    # given parameters on a mesh, and moments in the host's memory
    params, *gradients = random_trees(3)
    expected = updated(settings_of(kind), params, gradients)
    params = on_mesh(params, Mesh(fsdp=2, tensor=2))
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    spec = settings_of(kind, offload=True)
    optimizer = build_optimizer(spec, 10, described())
    abstract = abstract_state(optimizer, like, offload=True)
    shardings = jax.tree.map(lambda x: x.sharding, abstract)
    state = jax.jit(partial(init_state, optimizer), out_shardings=shardings)(params)
    # when updated, then parameters and moments are those of moments on the device
    found = updated(spec, params, gradients, state)
    assert_near(found, expected, 1e-6, 1e-7)
    # and they are still on the host
    like, found = jax.tree.leaves(abstract), jax.tree.leaves(found[1])
    assert [x.sharding.memory_kind for x in found] == [x.sharding.memory_kind for x in like]
    assert {x.sharding.memory_kind for x in found if x.ndim > 1} == {HOST_MEMORY}


def test_bfloat16_masters_are_updated_in_float32_and_rounded_once():
    # given the same weights of the usual size in both types, and a gradient for each
    key = jax.random.key(0)
    narrow = (0.005 + 0.05 * jax.random.uniform(key, (4096,))).astype(jnp.bfloat16)
    wide, gradient = narrow.astype(jnp.float32), jax.random.normal(key, (4096,))

    def one(weights: jax.Array, lr: float) -> jax.Array:
        """Jitted, as compilers may widen what they do not store."""
        optimizer = build_optimizer(Optimizer(lr=lr), 1)
        state = init_state(optimizer, weights)
        return jax.jit(partial(apply_gradients, optimizer))(weights, state, gradient)[0]

    # when updated, then one is the other, rounded
    np.testing.assert_array_equal(one(narrow, 1e-2), one(wide, 1e-2).astype(jnp.bfloat16))
    # and at the learning rate of the INTELLECT-2 recipe all float32 weights move, and no bfloat16
    assert (one(wide, 3e-7) != wide).all()
    assert (one(narrow, 3e-7) == narrow).all()
