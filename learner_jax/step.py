"""The learner's jitted programs: score, accumulate, apply, publish.

programs = build_programs(spec, config, mesh)
state = programs.init_state(shard_params(params, abstract_params(config), mesh))
published = programs.publish(state.params)          # the policy version's bits
old = programs.score(published, shard_batch(packed.token_batch(i), mesh))
total = programs.zeros()
total = programs.accumulate(state.params, total, token_batch, loss_inputs)   # a microbatch
state, grad_norm = programs.apply(state, total)      # uses up `state`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from bridge.config import ModelConfig
from learner_jax.arrays import Data, LossInputs, TokenBatch
from learner_jax.execution import Execution, execution
from learner_jax.logprobs import token_logprobs
from learner_jax.loss import grpo_loss
from learner_jax.loss_metrics import LossMetrics
from learner_jax.model import Params, abstract_params, final_hidden, head_weight
from learner_jax.optimizer import make_optimizer
from learner_jax.sharding import param_shardings
from runspec.common.errors import UserError
from runspec.spec.schema import RunSpec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that an update changes."""

    params: Any
    """float32 masters."""
    opt_state: Any
    updates: Data
    """Optimizer updates made, int32 []."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accumulated:
    """Sum over the microbatches of one optimizer batch."""

    grads: Any
    """float32, like the parameters."""
    metrics: LossMetrics


@dataclass(frozen=True)
class Programs:
    """Compiled on first use, one shape of microbatch each."""

    init_state: Callable[[Any], TrainState]
    """Parameters on the mesh -> a state with an empty optimizer; masters are float32 copies."""
    abstract_state: TrainState
    """`jax.ShapeDtypeStruct` with shardings: the target of a restore."""
    publish: Callable[[Any], Any]
    """Masters -> a copy in `broadcast.dtype`: the policy version as its bits."""
    score: Callable[[Any, TokenBatch], Array]
    """(published parameters, microbatch) -> log-probs of the targets, float32 [B, T], on every
    device; meaningful at the positions that predict an output token."""
    zeros: Callable[[], Accumulated]
    accumulate: Callable[[Any, Accumulated, TokenBatch, LossInputs], Accumulated]
    """(masters, sum, microbatch, its loss inputs) -> sum; donates the sum it is given."""
    apply: Callable[[TrainState, Accumulated], tuple[TrainState, Array]]
    """One update -> (state, global norm of the gradient before clipping); donates the state. A
    gradient that is not finite gives a norm that is not finite: check it before publishing."""


def sampling_temperature(spec: RunSpec) -> float:
    """The temperature of all pools.

    Raises:
        UserError: pools differ; log-probs of one run must speak of one distribution.
    """
    temperatures = {pool.sampling.temperature for pool in spec.samplers}
    if len(temperatures) > 1:
        raise UserError(
            f"pools sample at different temperatures: {sorted(temperatures)}",
            place="samplers",
            remedy="give every pool the same sampling.temperature",
        )
    return temperatures.pop()


def policy_logprobs(
    params: Params,
    config: ModelConfig,
    batch: TokenBatch,
    execution: Execution,
    *,
    temperature: float,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probs of the targets and entropies: `model.final_hidden`, then `token_logprobs`."""
    hidden = final_hidden(
        params,
        config,
        batch.tokens,
        batch.segment_ids,
        batch.positions,
        execution,
    )
    return token_logprobs(hidden, head_weight(params), batch.targets, temperature=temperature)


def build_programs(spec: RunSpec, config: ModelConfig, mesh: Mesh) -> Programs:
    """Makes the programs of a run on a mesh.

    Raises:
        UserError: the packing does not divide over the mesh, or pools differ in temperature.
    """
    _check_packing(spec, mesh)
    policy = partial(
        policy_logprobs,
        config=config,
        temperature=sampling_temperature(spec),
        execution=execution(spec.learner, mesh),
    )
    optimizer = make_optimizer(spec.optimizer)
    abstract_state = _abstract_state(config, mesh, optimizer)
    state_shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    params_shardings = state_shardings.params
    replicated = NamedSharding(mesh, PartitionSpec())
    broadcast_dtype = jnp.dtype(spec.broadcast.dtype)

    def init_state(params: Any) -> TrainState:
        masters = _copy_as(params, jnp.float32)
        return TrainState(masters, optimizer.init(masters), jnp.zeros((), jnp.int32))

    def publish(params: Any) -> Any:
        return _copy_as(params, broadcast_dtype)

    def score(params: Any, batch: TokenBatch) -> Array:
        return policy(params, batch=batch)[0]

    def zeros() -> Accumulated:
        grads = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_state.params)
        return Accumulated(grads, LossMetrics.zeros())

    def accumulate(
        params: Any, total: Accumulated, batch: TokenBatch, inputs: LossInputs
    ) -> Accumulated:
        def objective(params: Any) -> tuple[Array, LossMetrics]:
            return grpo_loss(
                *policy(params, batch=batch), batch.segment_ids, inputs, spec.algorithm
            )

        grads, metrics = jax.grad(objective, has_aux=True)(params)
        return Accumulated(jax.tree.map(jnp.add, total.grads, grads), total.metrics.merge(metrics))

    def apply(state: TrainState, total: Accumulated) -> tuple[TrainState, Array]:
        norm = optax.tree.norm(total.grads)
        updates, opt_state = optimizer.update(total.grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(params, opt_state, state.updates + 1), norm

    sum_shardings = Accumulated(
        params_shardings, jax.tree.map(lambda _: replicated, LossMetrics.zeros())
    )
    return Programs(
        init_state=jax.jit(init_state, out_shardings=state_shardings),
        abstract_state=abstract_state,
        publish=jax.jit(publish, out_shardings=params_shardings),
        score=jax.jit(score, out_shardings=replicated),
        zeros=jax.jit(zeros, out_shardings=sum_shardings),
        accumulate=jax.jit(accumulate, out_shardings=sum_shardings, donate_argnums=1),
        apply=jax.jit(apply, out_shardings=(state_shardings, replicated), donate_argnums=0),
    )


def _copy_as(params: Any, dtype: np.dtype | type) -> Any:
    # A copy also where the type is the same: `apply` donates the masters' buffers.
    return jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=True), params)


def _abstract_state(
    config: ModelConfig, mesh: Mesh, optimizer: optax.GradientTransformation
) -> TrainState:
    replicated = NamedSharding(mesh, PartitionSpec())
    abstract = abstract_params(config)
    params = jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, jnp.float32, sharding=sharding),
        abstract,
        param_shardings(abstract, mesh),
    )
    opt_state = optax.tree_map_params(
        optimizer,
        lambda leaf, like: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=like.sharding),
        jax.eval_shape(optimizer.init, params),
        params,
        transform_non_params=lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=replicated
        ),
    )
    return TrainState(params, opt_state, jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated))


def _check_packing(spec: RunSpec, mesh: Mesh) -> None:
    packing = spec.learner.packing
    rows, columns = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["context"]
    for field, size, cut in (("rows", packing.rows, rows), ("tokens", packing.tokens, columns)):
        if size % cut:
            raise UserError(
                f"{size} is not a multiple of {cut}, the devices that share them",
                place=f"learner.packing.{field}",
                remedy=f"choose a multiple of {cut}",
            )
