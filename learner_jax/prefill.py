"""The JAX prefill engine: what a published policy version says of given output tokens.

A validator loads it by name (`verify.plugins.PrefillEngine`). A prompt is computed once for the
rollouts of a microbatch that begin with it. Microbatches have few shapes, so few
programs are compiled. The head sees only the positions that predict a sampled token, a chunk at a
time, so [B, T, V] never exists.

A part is what a device computes at once: at most so many positions, each of which stands in the
packed rows (`attention.Rows`) of every rollout that it belongs to. The last token of an output is
the input of nothing, and has no position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from bridge.model_files import VersionedPrefill
from learner_jax.attention import Rows
from learner_jax.compile_cache import cache_folder, keep_compiled
from learner_jax.leaves import load_params
from learner_jax.model import bind
from learner_jax.packing import Data
from learner_jax.sharding import Execution, execution, full_float32, make_mesh, shard_batch
from runspec.core import schema
from runspec.core.models import ModelConfig
from runspec.core.models.family import load_config
from runspec.core.models.parameters import chunk_tokens, prefill_bytes
from runspec.core.schema import RunSpec
from verify.plugins import PrefillInput, PrefillOutput, WeightsLocation, by_prompt, require_fits
from verify.recompute import Drawn, TokenFacts, Vocabulary, Wanted, facts_of, outputs_of
from verify.truncation import HEADS, POWERS, Choices, Truncation

MOST_REPEATS = 4
"""Rows of a part, at most, of those that its positions would fill if each stood in one."""


@dataclass(frozen=True)
class Shape:
    """Shape of a part. There are few shapes, since each is compiled."""

    positions: int
    """U, of full parts a multiple of `tokens`; also the most sampled tokens."""
    rows: int
    """R."""
    tokens: int
    """T, of a row."""


@dataclass(frozen=True)
class Place:
    """Where a rollout is in its part."""

    member: int
    """Number of the rollout."""
    prompt: int
    """The first position of its prompt."""
    first: bool
    """Whether no rollout before it in the part has that prompt."""
    output: int
    """The first position of its output, all but the last token."""
    row: int
    column: int
    """Where its prompt begins in the rows."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillBatch:
    """A part for each of B shards, int32."""

    tokens: Data
    """[B, U]."""
    positions: Data
    """[B, U]: of each token in its rollout, from 0."""
    segment_ids: Data
    """[B R, T]: 1, 2, ... for the rollouts of a row, 0 for padding."""
    rows: Rows


def shape_for(inputs: Sequence[PrefillInput], *, tokens: int, rows: int) -> Shape:
    """The shape of full parts: as many rows as the prompts of these rollouts are shared.

    Args:
        inputs: at least one.
        tokens: length of a row.
        rows: that the positions of a part would fill if each stood in one.

    Raises:
        UserError: a rollout is longer than a row.
        ValueError: a rollout without prompt or output.
    """
    if not all(len(each.prompt_tokens) and len(each.output_tokens) for each in inputs):
        raise ValueError("a rollout needs a prompt token and an output token")
    require_fits(inputs, tokens)
    prompts = sum(len(inputs[members[0]].prompt_tokens) for members in by_prompt(inputs))
    outputs = sum(len(each.output_tokens) - 1 for each in inputs)
    laid_out = sum(len(each.prompt_tokens) for each in inputs) + outputs
    # In halves, and a quarter of the rows may be missing: a part that runs out of rows ends there.
    shared = laid_out / (prompts + outputs)
    halves = min(2 * MOST_REPEATS, max(2, ceil(2 * shared - 0.5)))
    return Shape(rows * tokens, -(-halves * rows // 2), tokens)


def divide(inputs: Sequence[PrefillInput], shape: Shape) -> list[list[Place]]:
    """Every rollout in one part, those of a prompt one after the other, the longest first.

    Args:
        inputs: the rollouts.
        shape: of `shape_for` the same.
    """
    parts: list[list[Place]] = []
    room: list[int] = []  # of each row of the part
    used = predicted = 0

    def size_of(member: int) -> int:
        return len(inputs[member].prompt_tokens) + len(inputs[member].output_tokens)

    groups = [sorted(members, key=size_of, reverse=True) for members in by_prompt(inputs)]
    for members in sorted(groups, key=lambda members: size_of(members[0]), reverse=True):
        length, prompt = len(inputs[members[0]].prompt_tokens), -1
        for member in members:
            count, sampled = len(inputs[member].output_tokens), len(inputs[member].sampled)
            size = length + count - 1
            row = next((n for n, left in enumerate(room) if left >= size), len(room))
            new = count - 1 + (length if prompt < 0 else 0)
            full = used + new > shape.positions or predicted + sampled > shape.positions
            if not parts or full or row >= shape.rows:
                parts.append([])
                room, used, predicted, prompt, row = [], 0, 0, -1, 0
            if row == len(room):
                room.append(shape.tokens)
            first = prompt < 0
            if first:
                prompt, used = used, used + length
            parts[-1].append(Place(member, prompt, first, used, row, shape.tokens - room[row]))
            used, predicted = used + count - 1, predicted + sampled
            room[row] -= size
    return parts


def lay_out(
    parts: Sequence[Sequence[Place]], inputs: Sequence[PrefillInput], shape: Shape, shards: int
) -> PrefillBatch:
    """The arrays of at most `shards` parts; the shards that get none are padding."""
    tokens, positions, places = np.zeros((3, shards, shape.positions), np.int32)
    laid = np.zeros((2, shards, shape.rows, shape.tokens), np.int32)
    for shard, part in enumerate(parts):
        sources, segment_ids = laid[:, shard]
        for number, place in enumerate(part, start=1):
            each = inputs[place.member]
            length, count = len(each.prompt_tokens), len(each.output_tokens) - 1
            at = place.row * shape.tokens + place.column
            own = slice(place.output, place.output + count)
            tokens[shard, own] = each.output_tokens[:-1]
            positions[shard, own] = np.arange(length, length + count)
            places[shard, own] = np.arange(at + length, at + length + count)
            prompt = slice(place.prompt, place.prompt + length)
            if place.first:
                tokens[shard, prompt] = each.prompt_tokens
                positions[shard, prompt] = np.arange(length)
                places[shard, prompt] = np.arange(at, at + length)
            middle, end = place.column + length, place.column + length + count
            sources[place.row, place.column : middle] = np.arange(prompt.start, prompt.stop)
            sources[place.row, middle:end] = np.arange(own.start, own.stop)
            segment_ids[place.row, place.column : end] = number
    sources, segment_ids = laid.reshape(2, -1, shape.tokens)
    return PrefillBatch(tokens, positions, segment_ids, Rows(sources, places))


def predicting(place: Place, rollout: PrefillInput) -> np.ndarray:
    """i32 [m]: the positions that predict the sampled tokens, the prompt's last among them."""
    at = np.arange(place.output - 1, place.output + len(rollout.output_tokens) - 1, dtype=np.int32)
    at[0] = place.prompt + len(rollout.prompt_tokens) - 1
    return at[rollout.sampled]


def halved(shape: Shape, parts: Sequence[Sequence[Place]], inputs: Sequence[PrefillInput]) -> Shape:
    """Half of the shape where that is enough for these parts, so that less is padding."""
    half = Shape(shape.positions // 2, -(-shape.rows // 2), shape.tokens)
    for part in parts:
        used = max(place.output + len(inputs[place.member].output_tokens) - 1 for place in part)
        predicted = sum(len(inputs[place.member].sampled) for place in part)
        rows = max(place.row for place in part) + 1
        if max(used, predicted) > half.positions or rows > half.rows:
            return shape
    return half


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
    shape = shape_for(inputs, tokens=packing.tokens, rows=rows)
    parts = divide(inputs, shape)
    together = [parts[start : start + devices] for start in range(0, len(parts), devices)]
    members = [[place.member for part in batch for place in part] for batch in together]
    ends = {each.end_token for each in inputs if each.end_token is not None}
    wanted = Wanted.of(inputs, truncation)
    how = execution(policy.learner, policy.mesh, remat="none")
    results = (
        _prefill(
            policy.params,
            shard_batch(lay_out(batch, inputs, fit, devices), policy.mesh),
            _query(batch, inputs, fit, devices),
            jnp.float32(temperature),
            np.int32(max(ends, default=0)),
            config=policy.config,
            execution=how,
            wanted=wanted,
        )
        for batch in together
        for fit in [halved(shape, batch, inputs)]
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


def _query(
    parts: Sequence[Sequence[Place]], inputs: Sequence[PrefillInput], shape: Shape, shards: int
) -> Query:
    table = np.zeros((5, shards * shape.positions), np.int32)
    begin = 0
    for shard, part in enumerate(parts):
        for place in part:
            each = inputs[place.member]
            at = predicting(place, each)
            end = begin + len(at)
            table[0, begin:end] = at + shard * shape.positions
            table[1, begin:end] = each.output_tokens[each.sampled]
            table[2, begin:end] = np.arange(end - begin)
            table[3:, begin:end] = np.asarray(each.noise_key or (0, 0), np.int32)[:, None]
            begin = end
    index, token, position, key_0, key_1 = table
    return Query(index, token, position, key_0, key_1, np.int32(begin))


@partial(jax.jit, static_argnames=("config", "execution", "wanted"))
def _prefill(
    params: Any,
    batch: PrefillBatch,
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
    hidden = bound(batch.tokens, batch.segment_ids, batch.positions, execution, batch.rows)
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
