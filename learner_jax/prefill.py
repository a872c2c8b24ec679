"""The JAX prefill engine: what a published policy version says of given output tokens.

A validator loads it by name (`verify.plugins.PrefillEngine`). A prompt is computed once for the
rollouts of a microbatch that begin with it. Microbatches have few shapes, so few
programs are compiled. The head sees only the positions that predict a sampled token, a chunk at a
time, so [B, T, V] never exists.

`learner_jax.shared_prompts` lays them out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from bridge.model_files import VersionedPrefill
from learner_jax.compile_cache import cache_folder, keep_compiled
from learner_jax.leaves import load_params
from learner_jax.model import bind
from learner_jax.packing import Sample, TokenBatch
from learner_jax.sharding import Execution, execution, full_float32, make_mesh, shard_batch
from learner_jax.shared_prompts import divide, halved, lay_out, shape_for
from runspec.core import schema
from runspec.core.models import ModelConfig
from runspec.core.models.family import load_config
from runspec.core.models.parameters import chunk_tokens, prefill_bytes
from runspec.core.schema import RunSpec
from verify.plugins import PrefillInput, PrefillOutput, WeightsLocation
from verify.recompute import Drawn, TokenFacts, Vocabulary, Wanted, facts_of, outputs_of
from verify.truncation import HEADS, POWERS, Choices, Truncation


def samples_of(inputs: Sequence[PrefillInput]) -> list[Sample]:
    return [Sample(each.prompt_tokens, each.output_tokens, each.own) for each in inputs]


MICROBATCH_TOKENS = 1 << 15
IN_FLIGHT = 3
"""Microbatches on the device at once, at most: small ones would wait for the host with fewer."""
MAX_CHUNK = 512
"""Sampled tokens whose logits exist at once, at most."""


class JaxPrefill(VersionedPrefill["Policy"]):
    """See `verify.plugins.PrefillEngine`. Keeps the versions of the allowed lag on the device."""

    def __init__(self, spec: RunSpec, weights: WeightsLocation) -> None:
        # A validator has hardware of its own: the kernel is the platform's.
        learner = spec.learner.model_copy(update={"attention": "auto"})
        full_float32(learner.compute_dtype)
        keep_compiled(cache_folder(spec))  # a validator that starts again has all that waits to do
        mesh = make_mesh(schema.Mesh(fsdp=len(jax.devices())))
        super().__init__(
            spec,
            weights,
            load=lambda path: load_policy(path, learner, mesh),
            has_room=partial(_has_room, mesh),
            compute=prefill,
        )


def _has_room(mesh: Mesh, size: int) -> bool:
    """Whether each device has room for its part of a version and for working with it."""
    needed = prefill_bytes(size, mesh.size)
    memories = [device.memory_stats() for device in mesh.local_devices]
    return all(m["bytes_limit"] - m["bytes_in_use"] >= needed for m in memories if m)  # none: CPUs


@dataclass(frozen=True)
class Policy:
    """A version on the device, and how it is run."""

    params: Any
    """In the published type."""
    config: ModelConfig
    learner: schema.Learner
    mesh: Mesh


def load_policy(weights_dir: Path, learner: schema.Learner, mesh: Mesh) -> Policy:
    """Puts a weights directory on the mesh.

    Raises:
        UserError: unreadable, or the packing's rows are longer than the model is exact for.
    """
    config = load_config(weights_dir)
    config.check_length(learner.packing.tokens, place="learner.packing.tokens")
    return Policy(load_params(weights_dir, config, mesh), config, learner, mesh)


def prefill(
    policy: Policy,
    inputs: Sequence[PrefillInput],
    *,
    temperature: float,
    truncation: Truncation | None = None,
) -> list[PrefillOutput]:
    """`verify.plugins.PrefillEngine.prefill`, under a version that is on the device."""
    if not inputs:
        return []
    packing, devices = policy.learner.packing, policy.mesh.size
    # About `MICROBATCH_TOKENS`, at most the learner's own rows, at least one for each device.
    rows = max(1, min(packing.rows, MICROBATCH_TOKENS // packing.tokens) // devices)
    samples = samples_of(inputs)
    shape = shape_for(samples, tokens=packing.tokens, rows=rows)
    parts = divide(samples, shape)
    together = [parts[start : start + devices] for start in range(0, len(parts), devices)]
    members = [[place.member for part in batch for place in part] for batch in together]
    ends = {each.end_token for each in inputs if each.end_token is not None}
    wanted = Wanted.of(inputs, truncation)
    how = execution(policy.learner, policy.mesh, remat="none")
    results = (
        _prefill(
            policy.params,
            shard_batch(batch, policy.mesh),
            _query(batch, [inputs[number] for number in numbers]),
            jnp.float32(temperature),
            np.int32(max(ends, default=0)),
            config=policy.config,
            execution=how,
            wanted=wanted,
        )
        for numbers, places in zip(members, together, strict=True)
        for batch in [lay_out(places, samples, halved(shape, places, samples), devices)]
    )
    outputs: dict[int, PrefillOutput] = {}
    for numbers, host in zip(members, _fetched(results), strict=True):
        own = outputs_of(host, [inputs[number] for number in numbers])
        outputs |= zip(numbers, own, strict=True)
    return [outputs[number] for number in range(len(inputs))]


def _fetched(results: Iterable[TokenFacts]) -> Iterator[TokenFacts]:
    """Each result on the host, fetched while the next `IN_FLIGHT` - 1 are computed.

    Args:
        results: dispatched as they are taken.
    """
    waiting: deque[TokenFacts] = deque()
    for result in results:
        waiting.append(result)
        if len(waiting) == IN_FLIGHT:
            yield jax.tree.map(np.asarray, waiting.popleft())
    while waiting:
        yield jax.tree.map(np.asarray, waiting.popleft())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Query:
    """The sampled tokens of a microbatch, [N]; the first `count` are real."""

    index: Any
    """i32: the position that predicts the token, of those of all shards."""
    token: Any
    """i32."""
    position: Any
    """i32: of the token among the sampled ones of its output."""
    key_0: Any
    key_1: Any
    """i32: the noise key of its rollout."""
    count: Any
    """i32 []."""


def _query(batch: TokenBatch, inputs: Sequence[PrefillInput]) -> Query:
    """Return the sampled tokens of a microbatch, of these rollouts in order."""
    assert batch.shared is not None
    asked, (shards, positions) = batch.targets >= 0, batch.targets.shape
    counts = [len(each.sampled) for each in inputs]
    index = batch.shared.predicts + np.arange(0, shards * positions, positions)[:, None]
    keys = np.array([each.noise_key or (0, 0) for each in inputs], np.int32)
    table = np.zeros((5, shards * positions), np.int32)
    count = sum(counts)
    table[:2, :count] = index[asked], batch.targets[asked]
    table[2, :count] = np.concatenate([np.arange(each) for each in counts])
    table[3:, :count] = np.repeat(keys, counts, axis=0).T
    index, token, position, key_0, key_1 = table
    return Query(index, token, position, key_0, key_1, np.int32(count))


@partial(jax.jit, static_argnames=("config", "execution", "wanted"))
def _prefill(
    params: Any,
    batch: TokenBatch,
    query: Query,
    temperature: Float[Array, ""],
    end_token: Int[Array, ""],
    *,
    config: ModelConfig,
    execution: Execution,
    wanted: Wanted,
) -> TokenFacts:
    """Return the results for a microbatch's sampled tokens."""
    bound = bind(config, params)
    assert batch.shared is not None
    where = batch.segment_ids, batch.positions, execution, batch.shared.seen
    hidden = bound(batch.tokens, *where)
    chosen = hidden.reshape(-1, hidden.shape[-1])[query.index]  # [N, D]
    bits = jax.lax.bitcast_convert_type(chosen.astype(jnp.bfloat16), jnp.uint16)
    judged = _judge(chosen, bound.head_weight(), query, temperature, end_token, wanted)
    return judged._replace(hidden=bits)


def _judge(
    hidden: Float[Array, "N D"],
    head: Float[Array, "D V"],
    query: Query,
    temperature: Float[Array, ""],
    end_token: Int[Array, ""],
    wanted: Wanted,
) -> TokenFacts:
    """All but the hidden states, from logits that exist a chunk at a time."""
    count = hidden.shape[0]
    chunk = min(MAX_CHUNK, chunk_tokens(count, head.shape[1]), count)
    vocabulary = Vocabulary.of(jnp.arange(head.shape[1], dtype=jnp.int32)[None, :])

    def one_chunk(number: Int[Array, ""], out: TokenFacts) -> TokenFacts:
        # The last chunk is moved back to end with the array; tokens seen twice get the same again.
        start = jnp.minimum(number * chunk, count - chunk)

        def cut(values: Array) -> Array:
            return jax.lax.dynamic_slice_in_dim(values, start, chunk)

        part = cut(hidden)
        columns = (query.token, query.position, query.key_0, query.key_1)
        drawn = Drawn(*(cut(column)[:, None] for column in columns))
        logits = jnp.einsum(
            "nd,dv->nv", part, head.astype(part.dtype), preferred_element_type=jnp.float32
        )
        logits = logits / temperature  # [chunk, V]
        found = facts_of(jnp, logits, drawn, vocabulary, end_token, wanted, repeat=_repeat)
        return jax.tree.map(
            lambda all_, part: jax.lax.dynamic_update_slice_in_dim(all_, part, start, 0),
            out,
            found,
        )

    # The arrays into which the chunks are written.
    zeros = jnp.zeros(count, jnp.float32)
    columns = {"log_powers": len(POWERS), "log_heads": len(HEADS)}
    shapes = ((count, columns[n]) if n in columns else (count,) for n in Choices._fields)
    choices = (
        Choices(*(jnp.zeros(shape, jnp.float32) for shape in shapes)) if wanted.choices else None
    )
    empty = TokenFacts(zeros, zeros if wanted.gaps else None, choices)
    # Only as many chunks as hold sampled tokens: prompts and padding cost no logits.
    chunks = (query.count + chunk - 1) // chunk
    return jax.lax.fori_loop(0, chunks, one_chunk, empty)


def _repeat(count: int, step: Callable[[Any], Any], state: Any) -> Any:
    return jax.lax.fori_loop(0, count, lambda _, reached: step(reached), state)
