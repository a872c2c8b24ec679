"""The JAX prefill engine: what a published policy version says of given output tokens.

A validator loads it by name (`verify.plugins.PrefillEngine`). Rollouts are packed into microbatches
of one shape, so one program is compiled; the head sees only the positions that predict an output
token, a chunk at a time, so that [B, T, V] never exists.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt16

from bridge.config import ModelConfig, load_config
from broadcast.client import WeightsClient
from learner_jax.arrays import TokenBatch
from learner_jax.execution import execution, full_float32
from learner_jax.leaves import load_params
from learner_jax.model import final_hidden, head_weight
from learner_jax.packing import Packed, Sample, pack
from learner_jax.sharding import make_mesh, shard_batch
from runspec.estimate.logits import chunk_tokens
from runspec.spec import schema
from runspec.spec.run_files import versions_in
from runspec.spec.schema import RunSpec
from verify.noise import gumbel
from verify.plugins import PrefillInput, PrefillOutput, WeightsLocation
from verify.truncation import Truncation, judged

MICROBATCH_TOKENS = 1 << 15
IN_FLIGHT = 3
"""Microbatches on the device at once, at most: small ones would wait for the host with fewer."""
MAX_CHUNK = 512
"""Output tokens whose logits exist at once, at most."""


class JaxPrefill:
    """See `verify.plugins.PrefillEngine`. Keeps the versions of the allowed lag on the device."""

    def __init__(self, spec: RunSpec, weights: WeightsLocation) -> None:
        # A validator has hardware of its own: the kernel is the platform's.
        self._learner = spec.learner.model_copy(update={"attention": "auto"})
        full_float32(self._learner.compute_dtype)
        self._mesh = make_mesh(schema.Mesh(fsdp=len(jax.devices())))
        self._client = WeightsClient(
            weights.urls,
            run=weights.run,
            root_public_key=weights.root_public_key,
            cache_dir=weights.cache_dir,
        )
        self._cache_dir, self._kept = weights.cache_dir, spec.algorithm.async_level + 1
        self._paths: dict[int, Path] = {}
        self._policies: OrderedDict[int, Policy] = OrderedDict()

    def ensure_version(self, version: int, manifest_digest: str, *, deadline_s: float) -> Path:
        path = self._client.fetch(version, manifest_digest=manifest_digest, deadline_s=deadline_s)
        self._paths[version] = path
        # Those of before a restart count: leases name them still, and deltas start from them.
        newest = versions_in(self._cache_dir)[-self._kept - 1 :]
        if version in newest:
            for old in set(self._paths) - set(newest):
                del self._paths[old]
            self._client.prune(set(newest))
        return path

    def prefill(
        self,
        version: int,
        inputs: Sequence[PrefillInput],
        *,
        temperature: float,
        truncation: Truncation | None = None,
    ) -> list[PrefillOutput]:
        policy = self._policies.get(version)
        if policy is None:
            while len(self._policies) >= self._kept:
                self._policies.popitem(last=False)
            policy = load_policy(self._paths[version], self._learner, self._mesh)
            self._policies[version] = policy
        self._policies.move_to_end(version)
        return prefill(policy, inputs, temperature=temperature, truncation=truncation)

    def close(self) -> None:
        """Closes the connections to the relays."""
        self._client.close()


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
    """Recomputes rollouts: log-probs, final hidden states and distances from the seeded choice.

    Args:
        policy: a version.
        inputs: the rollouts.
        temperature: T.
        truncation: top-k and top-p of the pool; None where nothing is cut.

    Raises:
        UserError: a rollout is longer than `learner.packing.tokens`.
    """
    if not inputs:
        return []
    packed = pack(
        [Sample(each.prompt_tokens, each.output_tokens) for each in inputs],
        tokens=policy.learner.packing.tokens,
        rows=_rows(policy),
    )
    queries = _queries(packed, inputs)
    results = (
        _prefill(
            policy.params,
            shard_batch(packed.token_batch(index), policy.mesh),
            queries[index],
            jnp.float32(temperature),
            config=policy.config,
            learner=policy.learner,
            mesh=policy.mesh,
            truncation=truncation if truncation is not None and truncation.cuts else None,
        )
        for index in range(packed.microbatches)
    )
    outputs: list[PrefillOutput | None] = [None] * len(inputs)
    for members, host in zip(_members(packed), _fetched(results), strict=True):
        begin = 0
        for member in members:
            end = begin + len(inputs[member].output_tokens)
            logprobs, hidden, gap = (array[begin:end] for array in host)
            seeded = inputs[member].noise_key is not None
            outputs[member] = PrefillOutput(logprobs, hidden, gap if seeded else None)
            begin = end
    return [output for output in outputs if output is not None]


def _fetched(results: Iterable[tuple[Array, ...]]) -> Iterator[tuple[np.ndarray, ...]]:
    """Each result on the host, fetched while the next `IN_FLIGHT` - 1 are computed.

    Args:
        results: dispatched as they are taken.
    """
    waiting: deque[tuple[Array, ...]] = deque()
    for result in results:
        waiting.append(result)
        if len(waiting) == IN_FLIGHT:
            yield tuple(np.asarray(array) for array in waiting.popleft())
    while waiting:
        yield tuple(np.asarray(array) for array in waiting.popleft())


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Query:
    """The output tokens of a microbatch, [N]; the first `count` are real."""

    index: Any
    """i32: the position that predicts the token, in the flattened rows."""
    token: Any
    """i32."""
    position: Any
    """i32: of the token in its output."""
    key_0: Any
    key_1: Any
    """i32: the noise key of its rollout."""
    count: Any
    """i32 []."""


def _rows(policy: Policy) -> int:
    """Rows of a microbatch: about `MICROBATCH_TOKENS`, at most the learner's own, whole devices."""
    packing, devices = policy.learner.packing, policy.mesh.size
    rows = min(packing.rows, MICROBATCH_TOKENS // packing.tokens)
    return max(devices, rows // devices * devices)


def _members(packed: Packed) -> list[list[int]]:
    """The samples of each microbatch, in order of their number."""
    members: list[list[int]] = [[] for _ in range(packed.microbatches)]
    for number, place in enumerate(packed.placements):
        members[place.microbatch].append(number)
    return members


def _queries(packed: Packed, inputs: Sequence[PrefillInput]) -> list[Query]:
    _, rows, tokens = packed.batch.tokens.shape
    queries = []
    for members in _members(packed):
        table = np.zeros((5, rows * tokens), np.int32)
        begin = 0
        for member in members:
            place, each = packed.placements[member], inputs[member]
            end = begin + len(each.output_tokens)
            start = place.row * tokens + place.start
            table[0, begin:end] = np.arange(start, start + end - begin)
            table[1, begin:end] = each.output_tokens
            table[2, begin:end] = np.arange(end - begin)
            table[3:, begin:end] = np.asarray(each.noise_key or (0, 0), np.int32)[:, None]
            begin = end
        index, token, position, key_0, key_1 = table
        queries.append(Query(index, token, position, key_0, key_1, np.int32(begin)))
    return queries


@partial(jax.jit, static_argnames=("config", "learner", "mesh", "truncation"))
def _prefill(
    params: Any,
    batch: TokenBatch,
    query: Query,
    temperature: Float[Array, ""],
    *,
    config: ModelConfig,
    learner: schema.Learner,
    mesh: Mesh,
    truncation: Truncation | None,
) -> tuple[Float[Array, " N"], UInt16[Array, "N D"], Float[Array, " N"]]:
    """Log-probs, bits of the bf16 hidden states, seeded gaps of a microbatch's output tokens."""
    hidden = final_hidden(
        params,
        config,
        batch.tokens,
        batch.segment_ids,
        batch.positions,
        execution(learner, mesh, remat="none"),
    )
    chosen = hidden.reshape(-1, hidden.shape[-1])[query.index]  # [N, D]
    bits = jax.lax.bitcast_convert_type(chosen.astype(jnp.bfloat16), jnp.uint16)
    logprobs, gaps = _judge(chosen, head_weight(params), query, temperature, truncation)
    return logprobs, bits, gaps


def _judge(
    hidden: Float[Array, "N D"],
    head: Float[Array, "D V"],
    query: Query,
    temperature: Float[Array, ""],
    truncation: Truncation | None,
) -> tuple[Float[Array, " N"], Float[Array, " N"]]:
    """Of each token log_softmax(logits / T), and max_v(logits_v / T + noise_v) minus its own.

    Where top-k or top-p cut the distribution, both as `verify.truncation.judged` has them.
    """
    count = hidden.shape[0]
    chunk = min(MAX_CHUNK, chunk_tokens(count, head.shape[1]), count)
    vocabulary = jnp.arange(head.shape[1], dtype=jnp.int32)[None, :]

    def one_chunk(number: Int[Array, ""], out: tuple[Array, Array]) -> tuple[Array, Array]:
        # The last chunk is moved back to end with the array; tokens seen twice get the same again.
        start = jnp.minimum(number * chunk, count - chunk)
        part = jax.lax.dynamic_slice_in_dim(hidden, start, chunk)
        token, position, key_0, key_1 = (
            jax.lax.dynamic_slice_in_dim(x, start, chunk)[:, None]
            for x in (query.token, query.position, query.key_0, query.key_1)
        )
        logits = jnp.einsum(
            "nd,dv->nv", part, head.astype(part.dtype), preferred_element_type=jnp.float32
        )
        logits = logits / temperature  # [chunk, V]
        noise = gumbel(jnp, key_0, key_1, position, vocabulary)
        own = vocabulary == token
        if truncation is None:
            noisy = logits + noise
            logprob = jnp.sum(jnp.where(own, logits, 0.0), -1) - jax.nn.logsumexp(logits, -1)
            gap = jnp.max(noisy, -1) - jnp.sum(jnp.where(own, noisy, 0.0), -1)
        else:
            logprob, gap = judged(jnp, logits, noise, own, truncation, repeat=_repeat)
        return (
            jax.lax.dynamic_update_slice_in_dim(out[0], logprob, start, 0),
            jax.lax.dynamic_update_slice_in_dim(out[1], gap, start, 0),
        )

    # Only as many chunks as hold output tokens: prompts and padding cost no logits.
    chunks = (query.count + chunk - 1) // chunk
    zeros = jnp.zeros(count, jnp.float32)
    return jax.lax.fori_loop(0, chunks, one_chunk, (zeros, zeros))


def _repeat(count: int, step: Callable[[Any], Any], state: Any) -> Any:
    return jax.lax.fori_loop(0, count, lambda _, reached: step(reached), state)
