"""TOPLOC proofs (arXiv 2501.16007) in numpy, byte-compatible with the `toploc` package 0.1.6.

A proof commits to the largest activations of a chunk of 32 output tokens in 258 bytes: a
polynomial over GF(65497) that gives, at each of their positions, their bf16 bits. Here are the
field, the chunks and positions that a proof covers, and its bytes.

Polynomials over GF(65497) are computed many at once, in float64. Elements are balanced residues,
integers in [-32748, 32748] held as float64. A product of three stays below 2**46 and a sum of 128
products below 2**38, far from the 2**53 up to which float64 is exact. So sums of products are
matrix products with one reduction at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

PRIME = 65497
TERMS = 128
"""Coefficients of every polynomial here: degree at most 127."""
_BABY = 16  # 128 = 8 x 16: powers are split as x**(16 b + a)
NODES = np.arange(-TERMS // 2, TERMS // 2, dtype=np.float64)
"""Fixed points at which a product of factors is evaluated and then interpolated."""


def reduce(values: np.ndarray) -> np.ndarray:
    """Return balanced residues of integers below 2**50 in magnitude.

    The result is exact: PRIME is odd, so no quotient lies within 2**-18 of a half, and rounding
    errors are smaller.
    """
    quotients = np.rint(values * (1.0 / PRIME))
    quotients *= -PRIME
    quotients += values
    return quotients


def canonical(values: np.ndarray) -> np.ndarray:
    """Return balanced residues as integers in [0, PRIME), i64."""
    integers = values.astype(np.int64)
    integers[integers < 0] += PRIME
    return integers


def evaluate(coefficients: np.ndarray, points: np.ndarray) -> np.ndarray:
    """Return values of polynomials at points.

    Args:
        coefficients: [C, 128], ascending.
        points: [C, k].

    Returns:
        [C, k].
    """
    return _evaluate(coefficients, _powers(reduce(points)))


def interpolate(points: np.ndarray, values: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Return the coefficients of the polynomials of least degree through some points.

    With M(X) = prod_i (X - x_i) and w_i = y_i / M'(x_i), Lagrange's sum_i w_i M(X) / (X - x_i),
    expanded in 1 / X, has the coefficients c_j = sum_{l > j} M_l s_{l-j-1} with the power sums
    s_m = sum_i w_i x_i**m. All of it is products of small matrices.

    Args:
        points: [C, 128], distinct modulo PRIME among the used ones of a row.
        values: [C, 128].
        used: bool [C, 128]; points that are not used are ignored.

    Returns:
        [C, 128], ascending, zero from the number of used points on.
    """
    points, values = reduce(points), reduce(values)
    powers = _powers(points)
    master = _from_roots(points, used)  # M_0 .. M_128
    degrees = np.arange(1.0, TERMS + 1)
    slopes = _evaluate(reduce(master[:, 1:] * degrees), powers)
    weights = np.where(used, reduce(values * _inverses()[canonical(slopes)]), 0.0)
    baby, giant = powers
    sums = reduce(giant * weights[:, None]) @ baby.swapaxes(1, 2)  # [C, 8, 16]
    return _correlate(master[:, 1:], reduce(sums).reshape(-1, TERMS))  # s_0 .. s_127


def _powers(points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return x**a for a < 16, and x**(16 b) for b < 8: [C, 16, k] and [C, 8, k]."""
    baby = _first_powers(points, _BABY)
    step = reduce(baby[:, -1] * points)
    return baby, _first_powers(step, TERMS // _BABY)


def _first_powers(points: np.ndarray, count: int) -> np.ndarray:
    powers = np.empty((points.shape[0], count, points.shape[1]))
    powers[:, 0], powers[:, 1] = 1.0, points
    have = 2
    while have < count:  # x**have * (x**0 .. x**(have-1))
        step = reduce(powers[:, have - 1] * points)
        powers[:, have : 2 * have] = reduce(powers[:, :have] * step[:, None])
        have *= 2
    return powers


def _evaluate(coefficients: np.ndarray, powers: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    baby, giant = powers
    blocks = coefficients.reshape(-1, TERMS // _BABY, _BABY)
    partial = reduce(blocks @ baby)  # [C, 8, k]
    partial *= giant
    return reduce(partial.sum(axis=1))


def _from_roots(roots: np.ndarray, used: np.ndarray) -> np.ndarray:
    """Return the coefficients M_0 .. M_128 of prod (X - root) over the used roots: [C, 129].

    The product is evaluated at 128 fixed nodes and interpolated by a fixed matrix. If all 128 roots
    are used, X**128 is one term too many for 128 nodes. So it is subtracted before and added after.
    """
    factors = NODES - roots[:, :, None]  # [C, roots, nodes]
    factors[~used] = 1.0
    monic = used.all(axis=1, keepdims=True).astype(np.float64)
    values = reduce(_product(factors) - monic * node_powers())
    return np.concatenate([reduce(values @ node_matrix()), monic], axis=1)


def _product(factors: np.ndarray) -> np.ndarray:
    """Return the product over axis 1, three at a time (at most 2**48 between reductions)."""
    while (count := factors.shape[1]) > 1:
        third = -(-count // 3)
        product = factors[:, :third].copy()
        for start in (third, 2 * third):
            rest = factors[:, start : start + third]
            product[:, : rest.shape[1]] *= rest
        factors = reduce(product)
    return factors[:, 0]


def _correlate(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return c_j = sum_{i >= j} left_i right_{i-j}: [C, 128]."""
    padded = np.concatenate([np.zeros((len(right), TERMS - 1)), right], axis=1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, TERMS, axis=1)  # [C, 128, 128]
    return reduce(np.einsum("cji,ci->cj", windows, left))[:, ::-1]


@cache
def _inverses() -> np.ndarray:
    """Return 1 / a for a in [0, PRIME), as a**(PRIME - 2); 0 for 0."""
    base = reduce(np.arange(PRIME, dtype=np.float64))
    result = np.ones(PRIME)
    for bit in f"{PRIME - 2:b}":
        result = reduce(result * result)
        if bit == "1":
            result = reduce(result * base)
    return result


@cache
def node_powers() -> np.ndarray:
    """Return node**128 at the fixed nodes: [128]."""
    return np.array([pow(int(node), TERMS, PRIME) for node in NODES], dtype=np.float64)


@cache
def node_matrix() -> np.ndarray:
    """Return the matrix from values at the fixed nodes to coefficients: [128 nodes, 128].

    Row j is Lagrange's basis polynomial of node j: N(X) / (X - t_j) divided by its value at t_j,
    with N(X) = prod_j (X - t_j), by synthetic division.
    """
    master = np.ones(1)  # descending powers
    for node in NODES:
        master = reduce(np.append(master, 0.0) - np.append(0.0, master * node))
    rows = np.empty((TERMS, TERMS))
    quotient, value = np.zeros(TERMS), np.zeros(TERMS)
    for power in range(TERMS - 1, -1, -1):
        quotient = reduce(master[TERMS - 1 - power] + quotient * NODES)
        value = reduce(value * NODES + quotient)
        rows[:, power] = quotient
    return reduce(rows * _inverses()[canonical(value)][:, None])


CHUNK_ROWS = 32
"""Output tokens in a chunk; the last chunk of a rollout may have fewer."""
TOP_K = 128
MAGNITUDE = 0x7FFF
"""Mask of all bits of a bf16 except the sign."""
INFINITY = 0x7F80
_BLOCK_ELEMENTS = 1 << 20  # activations worked on at once: bounds memory, fills the caches
_BLOCK_CHUNKS = 32


@dataclass(frozen=True)
class Selection:
    """The largest activations of C chunks.

    `select` gives them in order of decreasing magnitude, then position; a sampler's device gives
    them in any order. In chunks with fewer than 128 elements only the first k count.
    """

    indices: np.ndarray
    """i64 [C, 128]: positions in the flattened chunk."""
    bits: np.ndarray
    """i64 [C, 128]: bf16 bits at those positions."""
    sizes: np.ndarray
    """i64 [C]: elements of each chunk."""

    @property
    def k(self) -> np.ndarray:
        """i64 [C]: number of positions that count, min(128, elements of the chunk)."""
        return np.minimum(self.sizes, TOP_K)

    @property
    def used(self) -> np.ndarray:
        """bool [C, 128]."""
        return np.arange(TOP_K) < self.k[:, None]

    def __getitem__(self, chunks: slice) -> Selection:
        return Selection(self.indices[chunks], self.bits[chunks], self.sizes[chunks])


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """Return the bits, u16, of the nearest bf16, ties to even; of a NaN the bits of a NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    even = (bits >> 16) & 1
    rounded = (bits + (np.uint32(0x7FFF) + even)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)


def split(hidden: np.ndarray) -> list[np.ndarray]:
    """Return the chunks of u16 [n, D], flattened: views of at most 32 x D elements."""
    if hidden.dtype != np.uint16 or hidden.ndim != 2:
        raise TypeError(f"bf16 bits were expected as uint16 [n, D], not {hidden.dtype}")
    return [hidden[i : i + CHUNK_ROWS].reshape(-1) for i in range(0, len(hidden), CHUNK_ROWS)]


def blocks(chunks: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    """Yield chunks in portions that fit the caches."""
    if not chunks:
        return
    largest = max(chunk.size for chunk in chunks)
    count = max(1, min(_BLOCK_CHUNKS, _BLOCK_ELEMENTS // max(1, largest)))
    for start in range(0, len(chunks), count):
        yield list(chunks[start : start + count])


def select(chunks: Sequence[np.ndarray]) -> Selection:
    """Return the top k by magnitude of each chunk; of equal ones, the earlier position is first.

    Args:
        chunks: u16 bits, flat; lengths may differ.
    """
    sizes = np.array([chunk.size for chunk in chunks])
    width = max(TOP_K, int(sizes.max()))
    bits = np.zeros((len(chunks), width), dtype=np.uint16)  # padding never outranks an element
    for row, chunk in zip(bits, chunks, strict=True):
        row[: chunk.size] = chunk
    indices = _largest(bits & MAGNITUDE)
    chosen = np.take_along_axis(bits, indices, axis=1).astype(np.int64)
    return Selection(indices, chosen, sizes)


def injective_moduli(indices: np.ndarray) -> np.ndarray:
    """Return the largest modulus up to 65497 under which a row's positions are distinct: i64
    [C]."""
    moduli = np.full(len(indices), PRIME)
    pending = np.flatnonzero(indices.max(axis=1) >= PRIME)
    while pending.size:
        residues = np.sort(indices[pending] % moduli[pending, None], axis=1)
        pending = pending[(residues[:, 1:] == residues[:, :-1]).any(axis=1)]
        moduli[pending] -= 1
        if (moduli < TOP_K).any():
            raise ValueError("no modulus keeps the positions distinct")
    return moduli


def _largest(magnitudes: np.ndarray) -> np.ndarray:
    """Return the positions of each row's 128 largest, by decreasing magnitude, then position.

    A row is divided into about 512 strands. The 128th largest of the strands' maxima is a lower
    bound of the 128th largest element, so few candidates are left to sort. The result is [C, 128].
    """
    rows, width = magnitudes.shape
    depth = max(1, width // (4 * TOP_K))
    strands = magnitudes[:, : width // depth * depth].reshape(rows, depth, -1).max(axis=1)
    cut = strands.shape[1] - TOP_K
    bounds = np.partition(strands, cut, axis=1)[:, cut]
    found = np.flatnonzero(magnitudes >= bounds[:, None])
    row, column = np.divmod(found, width)
    order = (MAGNITUDE - magnitudes.reshape(-1)[found]).astype(np.int64)
    keys = np.sort(row << 48 | order << 32 | column)
    starts = np.searchsorted(keys, np.arange(rows, dtype=np.int64) << 48)
    return keys[starts[:, None] + np.arange(TOP_K)] & 0xFFFFFFFF


PROOF_BYTES = 2 + 2 * TOP_K


class MalformedProof(ValueError):
    """Raised for bytes that no honest prover writes, or for a wrong number of proofs."""


@dataclass(frozen=True)
class Proof:
    """A polynomial over GF(65497), and the modulus under which its positions are distinct."""

    modulus: int
    coefficients: np.ndarray
    """i64 [128], ascending, each in [0, 65497); zero beyond the positions that the chunk has."""

    def to_bytes(self) -> bytes:
        """Return the modulus, then the coefficients, as big-endian uint16; 258 bytes."""
        return np.append(self.modulus, self.coefficients).astype(">u2").tobytes()


def parse_proof(data: bytes, *, k: int = TOP_K) -> Proof:
    """Read a proof from outside.

    Args:
        data: bytes of the proof.
        k: number of positions of the chunk: min(128, elements).

    Raises:
        MalformedProof: the length is wrong, the modulus is outside [128, 65497] (it is 65497 if a
            chunk has fewer than 128 positions), a coefficient is 65497 or more, or one after the
            kth is not 0.
    """
    if len(data) != PROOF_BYTES:
        raise MalformedProof(f"{len(data)} bytes instead of {PROOF_BYTES}")
    words = np.frombuffer(data, dtype=">u2").astype(np.int64)
    modulus, coefficients = int(words[0]), words[1:]
    if not TOP_K <= modulus <= PRIME:
        raise MalformedProof(f"modulus {modulus} outside [{TOP_K}, {PRIME}]")
    if (coefficients >= PRIME).any():
        raise MalformedProof(f"coefficient {coefficients.max()} is not below {PRIME}")
    if coefficients[k:].any():
        raise MalformedProof(f"a coefficient beyond the {k} that the chunk has")
    return Proof(modulus, coefficients)


_CHUNKS_AT_ONCE = 32


def build_proofs(hidden_bits: np.ndarray) -> list[bytes]:
    """Build the proofs of one rollout.

    Args:
        hidden_bits: u16 [n, D], bits of the bf16 final hidden states that produced the n output
            tokens.

    Returns:
        One proof of 258 bytes for each 32 rows begun.

    Raises:
        ValueError: an activation is not finite.
    """
    return build_proofs_batch([hidden_bits])[0]


def build_proofs_batch(rollouts: Sequence[np.ndarray]) -> list[list[bytes]]:
    """Build the proofs of many rollouts at once, which is faster than one by one."""
    chunks = [split(hidden) for hidden in rollouts]
    flat = [chunk for rollout in chunks for chunk in rollout]
    proofs = iter([proof for block in blocks(flat) for proof in _encode(select(block))])
    return [[next(proofs) for _ in rollout] for rollout in chunks]


def build_proofs_of(selections: Sequence[Selection]) -> list[list[bytes]]:
    """Build proofs from largest activations that were selected elsewhere, as on a sampler's GPU.

    If the same positions were selected, the bytes are those of `build_proofs`. The order of a
    selection does not matter. Among equal magnitudes `select` takes the earliest and a device any
    of them, so `verify_proofs` judges agreement, and not the bytes.

    Args:
        selections: selection of each rollout with C chunks; C may differ.

    Returns:
        For each rollout C proofs of 258 bytes.

    Raises:
        ValueError: an activation is not finite; a position is outside its chunk or occurs twice.
    """
    if not selections:
        return []
    parts = zip(*((each.indices, each.bits, each.sizes) for each in selections), strict=True)
    whole = Selection(*map(np.concatenate, parts))
    proofs = iter(
        [
            proof
            for start in range(0, len(whole.sizes), _CHUNKS_AT_ONCE)
            for proof in _encode(_checked(whole[start : start + _CHUNKS_AT_ONCE]))
        ]
    )
    return [[next(proofs) for _ in each.sizes] for each in selections]


def _checked(selection: Selection) -> Selection:
    """Return the selection with unused positions as `select` has them, after those of the chunk."""
    indices = np.where(selection.used, selection.indices, np.arange(TOP_K))
    if (selection.used & ((indices < 0) | (indices >= selection.sizes[:, None]))).any():
        raise ValueError("a selected position lies outside its chunk")
    ordered = np.sort(indices, axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise ValueError("a position was selected twice")
    return Selection(indices, np.where(selection.used, selection.bits, 0), selection.sizes)


def _encode(selection: Selection) -> list[bytes]:
    if (selection.bits & MAGNITUDE >= INFINITY).any():
        raise ValueError("the activations are not finite")
    moduli = injective_moduli(selection.indices)
    points = selection.indices % moduli[:, None]
    coefficients = canonical(interpolate(points, selection.bits, selection.used))
    return [Proof(int(m), c).to_bytes() for m, c in zip(moduli, coefficients, strict=True)]
