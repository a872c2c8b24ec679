"""The codec in JAX, byte for byte that in numpy, where the activations are.

Field elements are u32 in [0, PRIME): a product of two stays below 2**32, and so does a sum of
65,536 reduced products, so that nothing needs 64 bits. The formulas are those of `field`.

`encode` and `evaluate_at` are compiled for each shape and take arrays that lie on a device. The
functions named as in `codec` and `statistics` are those, and pad to few shapes. No other module
here imports JAX.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from verify.toploc import statistics
from verify.toploc.field import NODES, PRIME, TERMS, canonical, node_matrix, node_powers
from verify.toploc.proof import MalformedProof, Proof
from verify.toploc.selection import INFINITY, MAGNITUDE, TOP_K, Selection, split
from verify.toploc.statistics import ChunkStatistics

LARGEST_CHUNK = 1 << 24
"""Elements: hidden 524,288. The strands of a chunk are numbered by 16 bits."""
_CHUNKS_AT_ONCE = 64
_NOT_FINITE, _NO_MODULUS = 1, 2
_U32 = jnp.uint32


def build_proofs(hidden_bits: np.ndarray) -> list[bytes]:
    """`codec.build_proofs` on JAX's default device."""
    return build_proofs_batch([hidden_bits])[0]


def build_proofs_batch(rollouts: Sequence[np.ndarray]) -> list[list[bytes]]:
    """`codec.build_proofs_batch` on JAX's default device."""
    chunks = [split(hidden) for hidden in rollouts]
    flat = [chunk for rollout in chunks for chunk in rollout]
    proofs = iter([proof for block in _blocks(flat) for proof in _built(block)])
    return [[next(proofs) for _ in rollout] for rollout in chunks]


def verify_proofs(hidden_bits: np.ndarray, proofs: Sequence[bytes]) -> list[ChunkStatistics]:
    """`statistics.verify_proofs` on JAX's default device."""
    result = verify_proofs_batch([hidden_bits], [proofs])[0]
    if isinstance(result, MalformedProof):
        raise result
    return result


def verify_proofs_batch(
    rollouts: Sequence[np.ndarray], proofs: Sequence[Sequence[bytes]]
) -> list[list[ChunkStatistics] | MalformedProof]:
    """`statistics.verify_proofs_batch` on JAX's default device.

    The device selects and evaluates. Of each chunk 128 positions, their bits and the claimed bits
    come back, from which the statistics are counted by the one definition that there is of them.
    """
    return statistics.verify_proofs_batch(rollouts, proofs, open_with=open_claims)


@jax.jit
def encode(bits: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Proofs of chunks on a device.

    Args:
        bits: u16 [C, E], bf16 bits of flattened chunks, zero from `sizes` on. E is 128 at least and
            `LARGEST_CHUNK` at most.
        sizes: i32 [C], elements of each chunk.

    Returns:
        The words of the proofs, u16 [C, 129]: the modulus, then the coefficients. u8 [C]: 0 where
        they are proofs, 1 where an activation is not finite, 2 where no modulus is large enough.
    """
    indices, values, used = _select(bits, sizes)
    moduli = _injective_moduli(indices)
    coefficients = _interpolate((indices % moduli[:, None]).astype(_U32), values, used)
    words = jnp.concatenate([moduli[:, None].astype(_U32), coefficients], axis=1)
    infinite = ((bits & MAGNITUDE) >= INFINITY).any(axis=1)
    faults = jnp.where(infinite, _NOT_FINITE, jnp.where(moduli < TOP_K, _NO_MODULUS, 0))
    return words.astype(jnp.uint16), faults.astype(jnp.uint8)


@jax.jit
def evaluate_at(
    bits: jax.Array, sizes: jax.Array, words: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What proofs claim of the largest activations of chunks on a device.

    Args:
        bits, sizes: as of `encode`.
        words: u16 [C, 129], well-formed proofs (`parse_proof`).

    Returns:
        Of the k largest, each i32 [C, 128]: their positions, their bits, and the claimed bits, in
        [0, PRIME).
    """
    indices, values, _ = _select(bits, sizes)
    moduli = words[:, :1].astype(jnp.int32)
    powers = _powers((indices % moduli).astype(_U32))
    claimed = _dot(powers, words[:, None, 1:].astype(_U32), axis=2)
    return indices, values.astype(jnp.int32), claimed.astype(jnp.int32)


def open_claims(chunks: list[np.ndarray], proofs: list[Proof]) -> tuple[Selection, np.ndarray]:
    """`statistics.open_claims` on JAX's default device."""
    bits, sizes = padded(chunks)
    words = np.ones((len(sizes), 1 + TERMS), np.uint16)  # of the padding: modulus 1
    for row, proof in zip(words, proofs, strict=False):
        row[0], row[1:] = proof.modulus, proof.coefficients
    found = evaluate_at(bits, sizes, words)
    indices, true, claimed = (np.asarray(f)[: len(chunks)].astype(np.int64) for f in found)
    return Selection(indices, true, sizes[: len(chunks)].astype(np.int64)), claimed


def _built(chunks: list[np.ndarray]) -> list[bytes]:
    bits, sizes = padded(chunks)
    words, faults = (np.asarray(found)[: len(chunks)] for found in encode(bits, sizes))
    if (faults == _NOT_FINITE).any():
        raise ValueError("the activations are not finite")
    if faults.any():
        raise ValueError("no modulus keeps the positions distinct")
    return [Proof(int(row[0]), row[1:].astype(np.int64)).to_bytes() for row in words]


def _blocks(chunks: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    for start in range(0, len(chunks), _CHUNKS_AT_ONCE):
        yield list(chunks[start : start + _CHUNKS_AT_ONCE])


def padded(chunks: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Chunks as `encode` takes them: u16 [C', E'] and i32 [C'].

    C' is a power of two and E' a multiple of 128, so that few shapes are compiled.

    Raises:
        ValueError: a chunk is larger than `LARGEST_CHUNK`.
    """
    largest = max(chunk.size for chunk in chunks)
    if largest > LARGEST_CHUNK:
        raise ValueError(f"a chunk of {largest} activations, more than {LARGEST_CHUNK}")
    count = 1 << (len(chunks) - 1).bit_length()
    bits = np.zeros((count, max(1, -(-largest // TOP_K)) * TOP_K), np.uint16)
    sizes = np.zeros(count, np.int32)
    for row, chunk in enumerate(chunks):
        bits[row, : chunk.size], sizes[row] = chunk, chunk.size
    return bits, sizes


# -- Selection --------------------------------------------------------------------------------


def _select(bits: jax.Array, sizes: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Positions i32, bits u32, and which of them count: each [C, 128], as `selection.select`."""
    indices = _largest((bits & MAGNITUDE).astype(jnp.int32))
    values = jnp.take_along_axis(bits, indices, axis=1).astype(_U32)
    used = jnp.arange(TOP_K, dtype=jnp.int32) < sizes.astype(jnp.int32)[:, None]
    return indices, values, used


def _largest(magnitudes: jax.Array) -> jax.Array:
    """Positions of the 128 largest of each row, by decreasing magnitude, then position: [C, 128].

    A row is cut into strands of neighbours. The 128 largest elements lie in the 128 strands whose
    largest come first in the same order, which leaves few candidates.
    """
    rows, width = magnitudes.shape
    length = 1
    while TOP_K * (2 * length) ** 2 <= width:  # as many strands as candidates, about
        length *= 2
    padded = jnp.pad(magnitudes, ((0, 0), (0, -width % length)))  # later, so never preferred
    strands = padded.reshape(rows, -1, length)
    first = jnp.sort(_top(strands.max(axis=2)), axis=1)  # candidates keep their order
    candidates = jnp.take_along_axis(strands, first[:, :, None], axis=1).reshape(rows, -1)
    chosen = _top(candidates)
    return jnp.take_along_axis(first, chosen // length, axis=1) * length + chosen % length


def _top(magnitudes: jax.Array) -> jax.Array:
    """The same of rows of at most 65,536 magnitudes below 2**15, whatever a device does with ties.

    Magnitude and position make one key of 31 bits, so that none are equal; as a normal f32 in the
    same order, since XLA sorts whole rows where top_k is asked for on anything else.
    """
    width = magnitudes.shape[1]
    if width > 1 << 16:
        raise ValueError(f"{width} activations to choose from: chunks are {LARGEST_CHUNK} at most")
    keys = (magnitudes << 16) - jnp.arange(width, dtype=jnp.int32) + (0xFFFF - (1 << 30))
    normal = jnp.where(keys < 0, -1 - keys, keys) + 0x0080_0000
    floats = lax.bitcast_convert_type(normal, jnp.float32)
    return lax.top_k(jnp.where(keys < 0, -floats, floats), TOP_K)[1]


def _injective_moduli(indices: jax.Array) -> jax.Array:
    """`selection.injective_moduli`: i32 [C]; below 128 where there is none."""

    def collides(moduli: jax.Array) -> jax.Array:
        residues = jnp.sort(indices % moduli[:, None], axis=1)
        return (residues[:, 1:] == residues[:, :-1]).any(axis=1) & (moduli >= TOP_K)

    def lower(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        moduli = state[0] - state[1].astype(jnp.int32)
        return moduli, collides(moduli)

    start = jnp.full(indices.shape[0], PRIME, jnp.int32)
    return lax.while_loop(lambda state: state[1].any(), lower, (start, collides(start)))[0]


# -- Polynomials ------------------------------------------------------------------------------


def _interpolate(points: jax.Array, values: jax.Array, used: jax.Array) -> jax.Array:
    """`field.interpolate`: u32 [C, 128] of points and values in [0, 2**16) to coefficients."""
    powers = _powers(points)  # [C, point, power]
    master = _from_roots(points, used)
    degrees = jnp.arange(1, TERMS + 1, dtype=_U32)
    slopes = _dot(powers, (master[:, 1:] * degrees % PRIME)[:, None], axis=2)
    weights = jnp.where(used, values * _inverse(slopes) % PRIME, 0)
    sums = _dot(powers, weights[:, :, None], axis=1)  # s_0 .. s_127
    return _correlate(master[:, 1:], sums)


def _dot(left: jax.Array, right: jax.Array, axis: int) -> jax.Array:
    return (left * right % PRIME).sum(axis=axis, dtype=_U32) % PRIME


def _powers(points: jax.Array) -> jax.Array:
    """x**0 .. x**127: [C, k] to [C, k, 128]."""
    powers = jnp.ones((*points.shape, 1), _U32)
    step = points[:, :, None] % PRIME
    while powers.shape[2] < TERMS:
        powers = jnp.concatenate([powers, powers * step % PRIME], axis=2)
        step = step * step % PRIME
    return powers


def _inverse(elements: jax.Array) -> jax.Array:
    """a**(PRIME - 2)."""
    result = jnp.ones_like(elements)
    for bit in f"{PRIME - 2:b}":
        result = result * result % PRIME
        if bit == "1":
            result = result * elements % PRIME
    return result


def _from_roots(roots: jax.Array, used: jax.Array) -> jax.Array:
    """`field._from_roots`: M_0 .. M_128 of prod (X - root) over the used roots, u32 [C, 129]."""
    nodes = jnp.asarray(canonical(NODES), _U32)
    factors = jnp.where(used[:, :, None], nodes + PRIME - roots[:, :, None] % PRIME, 1) % PRIME
    while (count := factors.shape[1]) > 1:
        factors = factors[:, : count // 2] * factors[:, count // 2 :] % PRIME
    monic = used.all(axis=1, keepdims=True).astype(_U32)
    highest = jnp.asarray(PRIME - canonical(node_powers()), _U32)
    values = (factors[:, 0] + monic * highest) % PRIME
    matrix = jnp.asarray(canonical(node_matrix()), _U32)
    return jnp.concatenate([_dot(values[:, :, None], matrix, axis=1), monic], axis=1)


def _correlate(left: jax.Array, right: jax.Array) -> jax.Array:
    """c_j = sum_{i >= j} left_i right_{i-j}: [C, 128]."""
    terms = np.arange(TERMS)
    shifts = terms[None] - terms[:, None]  # [j, i]
    shifted = jnp.where(shifts >= 0, right[:, np.maximum(shifts, 0)], 0)
    return _dot(shifted, left[:, None], axis=2)
