"""The gradient of an optimizer batch: right for every switch, the same however it is computed."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from learner_jax.execution import Execution
from learner_jax.loss import grpo_loss
from learner_jax.model import abstract_params, bind
from learner_jax.packing import Sample, TokenBatch, pack
from learner_jax.sharding import make_mesh, shard_batch, shard_params
from learner_jax.step import build_programs, policy_logprobs
from runspec.core.models.config import ModelConfig
from runspec.core.spec.schema import Grpo, Mesh, Packing, RunSpec
from tests.learner_jax.conftest import changed, tiny_spec
from tests.learner_jax.packed_inputs import inputs_of
from tests.learner_jax.reference import (
    MAX_NEW_TOKENS,
    Rollout,
    loss_of,
    make_rollouts,
    relative_errors,
)

pytestmark = pytest.mark.slow  # many programs to compile

CONFIG = ModelConfig("qwen2", 24, 16, 24, 2, 4, 2, 8, 64, 10000.0, 1e-6, False, True)
TEMPERATURE = 0.7
SWITCHES = {  # the rest of them in test_switches
    "clip": {"kl": {"coef": 0.1}, "entropy_coef": 0.3, "importance": {"cap": 1.5}},
    "sequence ratio": {"ratio": "sequence", "clip": {"delta": None}},
    "cispo": {"surrogate": "cispo", "clip": {"delta": None}, "loss_normalizer": "token"},
}


def rollouts_of(seed: int = 0, count: int = 10) -> list[Rollout]:
    return make_rollouts(np.random.default_rng(seed), CONFIG.vocab_size, count, longest=30)


def params_of(dtype: Any) -> Any:
    """Parameters with biases and norms that matter; the same in every type."""
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda s: jnp.asarray(
            s.initial.mean + rng.normal(size=s.shape) * (s.initial.std or 0.1), dtype
        ),
        abstract_params(CONFIG),
    )


@partial(jax.jit, static_argnames="mesh")
def logprobs64(params: Any, batch: TokenBatch, mesh: jax.sharding.Mesh | None) -> Any:
    return policy_logprobs(
        bind(CONFIG, params),
        batch,
        temperature=TEMPERATURE,
        execution=Execution(jnp.float64, "full", mesh=mesh),
    )


def packed_gradient64(
    rollouts: list[Rollout],
    algorithm: Grpo,
    *,
    tokens: int,
    rows: int = 1,
    mesh: jax.sharding.Mesh | None = None,
) -> Any:
    """The learner's pure functions in float64, a microbatch at a time."""
    packed = pack([Sample(r.prompt, r.output) for r in rollouts], tokens=tokens, rows=rows)
    inputs, params = inputs_of(packed, rollouts, algorithm), params_of(jnp.float64)
    if mesh is not None:
        params = shard_params(params, abstract_params(CONFIG), mesh)

    def objective(params: Any) -> jax.Array:
        total = jnp.zeros(())
        for i in range(packed.microbatches):
            part = jax.tree.map(lambda x, i=i: x[i], inputs)
            batch = packed.token_batch(i)
            if mesh is not None:
                batch, part = shard_batch((batch, part), mesh)
            outputs = logprobs64(params, batch, mesh)
            total = total + grpo_loss(*outputs, batch.segment_ids, part, algorithm)[0]
        return total

    return jax.grad(objective)(params)


def true_gradient(rollouts: list[Rollout], algorithm: Grpo) -> Any:
    return jax.grad(loss_of)(
        params_of(jnp.float64),
        CONFIG,
        rollouts,
        algorithm,
        temperature=TEMPERATURE,
        max_new_tokens=MAX_NEW_TOKENS,
    )


@pytest.mark.parametrize("switches", SWITCHES.values(), ids=SWITCHES.keys())
def test_gradient_is_that_of_the_formula(switches: dict[str, Any]) -> None:
    # given one optimizer batch and an algorithm
    rollouts, algorithm = rollouts_of(count=5), Grpo.model_validate(switches)
    with jax.enable_x64(True):
        # when the gradient is computed packed, over microbatches, and by the plain formula
        found = packed_gradient64(rollouts, algorithm, tokens=48)
        expected = true_gradient(rollouts, algorithm)
    # then every tensor agrees
    assert max(relative_errors(found, expected).values()) < 1e-10


def test_gradient_does_not_depend_on_the_packing_in_float64() -> None:
    rollouts, algorithm = rollouts_of(), Grpo()
    with jax.enable_x64(True):
        short, long = (packed_gradient64(rollouts, algorithm, tokens=t) for t in (32, 100))
    assert max(relative_errors(short, long).values()) < 1e-10


def spec_of(mesh: dict[str, int], tokens: int, rows: int, remat: str = "full") -> RunSpec:
    packing = Packing(tokens=tokens, rows=rows)
    learner = {"mesh": Mesh(**mesh), "packing": packing, "remat": remat}
    spec = changed(tiny_spec(), learner=learner)
    sampling = spec.samplers[0].sampling.model_copy(update={"temperature": TEMPERATURE})
    pool = spec.samplers[0].model_copy(update={"sampling": sampling})
    return spec.model_copy(update={"samplers": [pool], "algorithm": Grpo(kl={"coef": 0.1})})


def program_gradient(spec: RunSpec, rollouts: list[Rollout]) -> tuple[Any, dict[str, float]]:
    """The gradient and metrics by the jitted programs, in float32."""
    mesh, packing = make_mesh(spec.learner.mesh), spec.learner.packing
    programs = build_programs(spec, CONFIG, mesh)
    params = shard_params(params_of(jnp.float32), abstract_params(CONFIG), mesh)
    samples = [Sample(r.prompt, r.output) for r in rollouts]
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    packed = pack(samples, tokens=packing.tokens, rows=packing.rows, shards=shards)
    inputs = jax.tree.map(
        lambda x: x.astype(np.float32), inputs_of(packed, rollouts, spec.algorithm)
    )
    total = programs.accumulate(
        params, shard_batch(packed.batch, mesh), shard_batch(inputs, mesh), packed.microbatches
    )
    total = jax.device_get(total)
    return total.grads, total.metrics.means()


@pytest.fixture(scope="module")
def expected() -> tuple[Any, dict[str, float]]:
    return program_gradient(spec_of({}, tokens=64, rows=4), rollouts_of())


@pytest.mark.parametrize(
    ("mesh", "tokens", "rows", "remat"),
    [
        ({}, 200, 1, "none"),
        ({"fsdp": 2}, 64, 4, "dots"),
        ({"data": 2}, 64, 2, "attention"),
        ({"tensor": 2}, 64, 4, "offload"),
        ({"context": 2, "tensor": 2}, 64, 4, "none"),
        ({"data": 2, "fsdp": 2, "slices": 2}, 48, 4, "full"),
        ({"fsdp": 2, "context": 2, "tensor": 2}, 64, 4, "full"),
        ({"data": 2, "context": 4}, 64, 2, "offload"),
    ],
)
def test_gradient_is_the_same_on_every_mesh_and_packing(
    mesh: dict[str, int], tokens: int, rows: int, remat: str, expected: tuple[Any, dict[str, float]]
) -> None:
    # given one optimizer batch, when it is packed and sharded another way
    grads, metrics = program_gradient(spec_of(mesh, tokens, rows, remat), rollouts_of())
    # then gradients and metrics are those of one device
    assert max(relative_errors(grads, expected[0]).values()) <= 1e-5
    assert metrics == pytest.approx(expected[1], rel=1e-5)


def test_gradient_in_float32_is_near_the_truth(expected: tuple[Any, dict[str, float]]) -> None:
    with jax.enable_x64(True):
        truth = true_gradient(rollouts_of(), Grpo(kl={"coef": 0.1}))
    assert max(relative_errors(expected[0], truth).values()) < 1e-4


@pytest.mark.parametrize(
    "mesh",
    [{"fsdp": 2, "context": 2, "tensor": 2}, {"data": 2, "fsdp": 2, "tensor": 2}],
    ids=lambda mesh: " ".join(mesh),
)
def test_gradient_in_float64_is_the_same_on_every_mesh(mesh: dict[str, int]) -> None:
    # given one optimizer batch, when its rows, their columns and the weights are cut in two
    rollouts, algorithm = rollouts_of(count=6), Grpo(kl={"coef": 0.1})
    with jax.enable_x64(True):
        one = packed_gradient64(rollouts, algorithm, tokens=48)
        many = packed_gradient64(
            rollouts, algorithm, tokens=48, rows=4, mesh=make_mesh(Mesh(**mesh))
        )
    # then only the order of sums differs
    assert max(relative_errors(many, one).values()) < 1e-10
