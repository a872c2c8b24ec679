"""The learner's jitted programs: score, accumulate, apply, publish.

    programs = build_programs(spec, config, mesh)
    state = programs.init_state(shard_params(params, abstract_params(config), mesh))
    published = programs.publish(state.params)              # the policy version's bits
    packed = pack_samples(samples, spec, mesh, microbatch_bound(spec))
    tokens = shard_batch(packed.batch, mesh)                # the whole optimizer batch
    old = programs.score(published, tokens, packed.microbatches)
    inputs = LossInputs(*shard_batch(...), old_logprobs=old, ...)
    total = programs.accumulate(state.params, tokens, inputs, packed.microbatches)
    state, update = programs.apply(state, total)            # uses up `state`

Each is compiled once: M is fixed by the spec, and loops run over the microbatches that are there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from learner_jax.attention import taken
from learner_jax.logprobs import DocumentMetrics, Level, document_loss, token_logprobs
from learner_jax.loss import grpo_loss
from learner_jax.metrics import LossMetrics
from learner_jax.model import Policy, abstract_lora, abstract_params, bind, init_lora, merge_lora
from learner_jax.optimizer import abstract_state as abstract_moments
from learner_jax.optimizer import apply_gradients, build_optimizer, init_state, rise_of
from learner_jax.packing import Data, LossInputs, SharedPrompts, Spans, TokenBatch, row_bound
from learner_jax.sharding import (
    Execution,
    batch_sharding,
    check_packing,
    execution,
    param_shardings,
    shard_batch,
    wide_dtype,
)
from learner_jax.shared_prompts import shares_prompts
from runspec.core.errors import UserError
from runspec.core.models import ModelConfig
from runspec.core.schema import RunSpec

JOINING_UPDATES = 10
"""Updates over which the learning rate of an island rises when it begins with zero moments."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that an update changes."""

    params: Any
    """The masters: the weights, or the adapters where `learner.lora` is set; in
    `learner.master_dtype`."""
    optimizer: optax.OptState
    """Moments, in at least float32, and the count of updates made."""
    skipped: Data
    """Updates skipped in a row since the last one that was made, int32 []."""
    joined: Data | None = None
    """Updates since an island began with zero moments, int32 []; None for a run with one
    learner."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Accumulated:
    """Gradient and metrics of one optimizer batch."""

    grads: Any
    """Summed over its microbatches, in float32; of the parameters' shapes."""
    metrics: Any
    """`LossMetrics`; of runs that train on documents `DocumentMetrics`."""
    logprobs: Data
    """log pi_theta of the targets, float32 [M, rows, tokens]."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Update:
    """Outcome of an optimizer batch."""

    grad_norm: Data
    """Global norm of the gradient before clipping, float32 []."""
    skipped: Data
    """int32 []: 0 where the update was made. Else its loss or gradient was not finite, the state
    is as it was, and this many updates in a row have been skipped."""


@dataclass(frozen=True)
class Programs:
    """Compiled on first use, once each."""

    abstract_state: TrainState
    """`jax.ShapeDtypeStruct` with shardings: the target of a restore."""
    abstract_batch: tuple[TokenBatch, Any]
    """The same of what `score` and `accumulate` take, [M, rows, tokens]: tokens, `LossInputs`."""
    abstract_base: Any | None
    """The same of the frozen weights under adapters; None where the weights are trained."""
    init_state: Callable[[Any], TrainState]
    """Parameters on the mesh -> a state with an empty optimizer; masters are copies, or adapters
    drawn from the run's seed."""
    freeze: Callable[[Any], Any]
    """Parameters -> a copy in `broadcast.dtype`: version 0's bits, and the base of adapters."""
    publish: Callable[..., Any]
    """(masters, base=None) -> the weights in `broadcast.dtype`, adapters merged into the base: the
    policy version as its bits."""
    score: Callable[[Any, TokenBatch, int], Array]
    """(published weights, microbatches, how many are real) -> log-probs of the targets, float32
    [M, rows, tokens], sharded as `LossInputs` are; 0 where no target is."""
    accumulate: Callable[..., Accumulated]
    """(masters, microbatches, their loss inputs, how many are real, base=None) -> gradient and
    metrics."""
    apply: Callable[[TrainState, Accumulated], tuple[TrainState, Update]]
    """One update, or none where it would not be finite; donates the state."""


def sampling_temperature(spec: RunSpec) -> float:
    """The temperature of all pools; 1 for runs without samplers.

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
    return temperatures.pop() if temperatures else 1.0


def microbatch_bound(spec: RunSpec) -> int:
    """M: the microbatches that no optimizer batch of the run needs more of.

    Raises:
        UserError: a supervised run's `tokens_per_update` is no number of whole microbatches.
    """
    packing = spec.learner.packing
    if spec.supervised is not None:
        size, asked = packing.tokens * packing.rows, spec.supervised.tokens_per_update
        if asked % size:
            raise UserError(
                f"{asked} is not a multiple of {size}, the positions of a microbatch",
                place="algorithm.tokens_per_update",
                remedy=f"choose a multiple of {size}, or change learner.packing",
            )
        return asked // size
    algorithm = spec.grpo
    groups = -(-algorithm.prompts_per_step // algorithm.updates_per_step)
    longest = min(packing.tokens, max(pool.max_model_len for pool in spec.samplers))
    return -(-row_bound(groups * algorithm.group_size, longest, packing.tokens) // packing.rows)


def policy_logprobs(
    policy: Policy,
    batch: TokenBatch,
    execution: Execution,
    *,
    temperature: float,
    chunk: int | None = None,
    level: Level | None = None,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probs of the targets, and entropies or levels: hidden states, then `token_logprobs`."""
    shared, where = batch.shared, (batch.segment_ids, batch.positions, execution)
    if shared is None:
        hidden = policy(batch.tokens, *where)
    else:
        hidden = taken(policy(batch.tokens, *where, shared.seen), shared.predicts)
    return token_logprobs(
        hidden,
        policy.head_weight(),
        batch.targets,
        temperature=temperature,
        mesh=execution.mesh,
        chunk=chunk,
        level=level,
    )


def build_programs(
    spec: RunSpec, config: ModelConfig, mesh: Mesh, *, island: bool = False, step: int = 0
) -> Programs:
    """Makes the programs of a run on a mesh.

    Args:
        spec: of the run, or that by which one island trains.
        config: of the model.
        mesh: of the program.
        island: whether it is an island, whose rate rises when it joins (`TrainState.joined`).
        step: that they train; `RunSpec.changes` says for which others they are the same.

    Raises:
        UserError: the packing does not divide over the mesh, its rows are longer than the model
            is exact for, or pools differ in temperature.
    """
    spec = spec.at_step(step)
    check_packing(spec.learner.packing, mesh)
    config.check_length(spec.learner.packing.tokens, place="learner.packing.tokens")
    lora, updates = spec.learner.lora, spec.steps * spec.algorithm.updates_per_step
    trained = abstract_params(config) if lora is None else abstract_lora(config, lora)
    optimizer = build_optimizer(spec.optimizer, updates, trained, rise_of(spec))
    params = abstract_like(trained, mesh, jnp.dtype(spec.learner.master_dtype))
    moments = abstract_moments(optimizer, params, offload=spec.optimizer.offload)
    replicated = NamedSharding(mesh, PartitionSpec())
    number = jax.ShapeDtypeStruct((), jnp.int32, sharding=replicated)
    abstract_state = TrainState(params, moments, number, number if island else None)
    abstract_batch = _abstract_batch(spec, mesh)
    weights = abstract_like(abstract_params(config), mesh, jnp.dtype(spec.broadcast.dtype))
    state, published = shardings(abstract_state), shardings(weights)
    per_token = abstract_batch[1].weights.sharding
    summed = Accumulated(
        state.params, jax.tree.map(lambda _: replicated, _no_metrics(spec)), per_token
    )
    how, temperature = execution(spec.learner, mesh), sampling_temperature(spec)
    run = _Run(spec, config, how, temperature, optimizer, island)
    return Programs(
        abstract_state=abstract_state,
        abstract_batch=abstract_batch,
        abstract_base=None if lora is None else weights,
        init_state=jax.jit(run.init_state, out_shardings=state),
        freeze=jax.jit(run.freeze, out_shardings=published),
        publish=jax.jit(run.publish, out_shardings=published),
        score=jax.jit(run.score, out_shardings=per_token),
        accumulate=jax.jit(run.accumulate, out_shardings=summed),
        apply=jax.jit(run.apply, out_shardings=(state, replicated), donate_argnums=0),
    )


def compile_ahead(
    mesh: Mesh,
    programs: Programs,
    state: TrainState,
    scored: Any | None,
    base: Any | None = None,
) -> None:
    """Compiles the large programs, on no microbatch, while there is nothing to train yet.

    Args:
        mesh, programs, state: of the run.
        scored: parameters whose log-probs the run needs; None where it needs none.
    """
    tokens, inputs = shard_batch(
        jax.tree.map(lambda like: np.zeros(like.shape, like.dtype), programs.abstract_batch), mesh
    )
    total = jax.block_until_ready(programs.accumulate(state.params, tokens, inputs, 0, base))
    # Into the compile cache alone: a call would use up the state.
    programs.apply.lower(state, total).compile()  # type: ignore[attr-defined]
    if scored is not None:
        jax.block_until_ready(programs.score(scored, tokens, 0))


@dataclass(frozen=True)
class _Run:
    """The programs of a run as functions, by the names that they have in `Programs`."""

    spec: RunSpec
    config: ModelConfig
    execution: Execution
    temperature: float
    """Temperature of sampling."""
    optimizer: optax.GradientTransformationExtraArgs
    island: bool

    def init_state(self, params: Any) -> TrainState:
        learner = self.spec.learner
        if learner.lora is not None:
            params = init_lora(self.config, learner.lora, jax.random.key(self.spec.seed))
        masters = _copy_as(params, jnp.dtype(learner.master_dtype))
        # Version 0 has the schedule's own warm-up.
        joined = jnp.full((), JOINING_UPDATES, jnp.int32) if self.island else None
        optimizer = init_state(self.optimizer, masters)
        return TrainState(masters, optimizer, jnp.zeros((), jnp.int32), joined)

    def freeze(self, params: Any) -> Any:
        return _copy_as(params, jnp.dtype(self.spec.broadcast.dtype))

    def publish(self, params: Any, base: Any = None) -> Any:
        lora, dtype = self.spec.learner.lora, jnp.dtype(self.spec.broadcast.dtype)
        return self.freeze(params if lora is None else merge_lora(base, params, lora, dtype))

    def score(self, params: Any, batches: TokenBatch, count: Array) -> Array:
        def one(i: Array, scores: Array) -> Array:
            return scores.at[i].set(self._logprobs(bind(self.config, params), _at(batches, i))[0])

        return jax.lax.fori_loop(0, count, one, jnp.zeros(batches.tokens.shape, jnp.float32))

    def accumulate(
        self, params: Any, batches: TokenBatch, inputs: Any, count: Array, base: Any = None
    ) -> Accumulated:
        def one(i: Array, total: Accumulated) -> Accumulated:
            grads, (metrics, logprobs) = jax.grad(self._objective, has_aux=True)(
                params, base, _at(batches, i), _at(inputs, i)
            )
            return Accumulated(
                jax.tree.map(jnp.add, total.grads, grads),
                total.metrics.merge(metrics),
                total.logprobs.at[i].set(logprobs),
            )

        nothing = Accumulated(
            jax.tree.map(lambda leaf: jnp.zeros_like(leaf, wide_dtype(leaf.dtype)), params),
            jax.tree.map(jnp.asarray, _no_metrics(self.spec)),
            jnp.zeros(inputs.weights.shape, inputs.weights.dtype),
        )
        return jax.lax.fori_loop(0, count, one, nothing)

    def apply(self, state: TrainState, total: Accumulated) -> tuple[TrainState, Update]:
        norm = optax.tree.norm(total.grads)
        made = jnp.isfinite(norm) & jnp.isfinite(total.metrics.loss)
        joined, scale = state.joined, None
        if joined is not None:
            scale = jnp.minimum(1.0, (joined + 1) / JOINING_UPDATES)
            joined = joined + made
        params, optimizer = apply_gradients(
            self.optimizer, state.params, state.optimizer, total.grads, made=made, scale=scale
        )
        skipped = jnp.where(made, 0, state.skipped + 1)
        return TrainState(params, optimizer, skipped, joined), Update(norm, skipped)

    def _logprobs(
        self, policy: Policy, batch: TokenBatch, level: Level | None = None
    ) -> tuple[Array, Array]:
        return policy_logprobs(
            *(policy, batch, self.execution),
            temperature=self.temperature,
            chunk=self.spec.learner.logits_chunk,
            level=level,
        )

    def _objective(
        self, params: Any, base: Any, batch: TokenBatch, inputs: Any
    ) -> tuple[Array, tuple[Any, Array]]:
        lora = self.spec.learner.lora
        trees = (params,) if lora is None else (base, params)
        policy = bind(self.config, *trees, lora=lora)
        if self.spec.supervised is not None:
            z_loss = self.spec.supervised.z_loss
            logprobs, level = self._logprobs(policy, batch, z_loss.kind)
            loss, found = document_loss(logprobs, level if z_loss.coef else None, inputs, z_loss)
            return loss, (found, logprobs)
        logprobs, entropy = self._logprobs(policy, batch)
        loss, metrics = grpo_loss(logprobs, entropy, batch.segment_ids, inputs, self.spec.grpo)
        return loss, (metrics, logprobs)


def _no_metrics(spec: RunSpec) -> LossMetrics | DocumentMetrics:
    return LossMetrics.zeros() if spec.supervised is None else DocumentMetrics.zeros()


def shardings(abstract: Any) -> Any:
    """Those of a tree of `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract)


def _at(batches: Any, i: Array) -> Any:
    """Microbatch i of a tree of [M, rows, tokens]."""
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), batches)


def _copy_as(params: Any, dtype: np.dtype | type) -> Any:
    # A copy also where the type is the same: `apply` donates the masters' buffers.
    return jax.tree.map(lambda leaf: jnp.array(leaf, dtype, copy=True), params)


def abstract_like(specs: Any, mesh: Mesh, dtype: np.dtype | type) -> Any:
    """`jax.ShapeDtypeStruct` for a tree of `Parameter`."""
    return jax.tree.map(
        lambda spec, sharding: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=sharding),
        specs,
        param_shardings(specs, mesh),
    )


def _abstract_batch(spec: RunSpec, mesh: Mesh) -> tuple[TokenBatch, Any]:
    packing, sharing = spec.learner.packing, shares_prompts(spec, mesh)
    shards = mesh.shape["data"] * mesh.shape["fsdp"] if sharing else packing.rows
    shape = (microbatch_bound(spec), shards, packing.rows * packing.tokens // shards)
    sharding = batch_sharding(mesh, shape)
    token, value = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for dtype in (jnp.int32, jnp.float32)
    )
    shared = SharedPrompts(Spans(token, token, token), token) if sharing else None
    tokens = TokenBatch(token, token, token, token, shared)
    if spec.supervised is not None:
        return tokens, LossInputs(value)
    reference = value if spec.grpo.kl.coef else None
    return tokens, LossInputs(value, value, value, value, reference)
