"""Compares proofs with recomputed activations, and bounds what a guess could hit.

A polynomial of degree above 0 takes a prescribed value, within r units in the last place, at some
128 log(65497) / log(65497 / (2r + 1)) positions at most (there are 65497**128 polynomials; each
position leaves a share of (2r + 1) / 65497 of them): 172 for r = 8, 206 for r = 32. A forger who
knows a model's statistics chooses the positions where it is often large, and the values that it
often has there. So a forger is granted 256 cells of the chunk: as many whole channels as make
these, a signed value for each. The best choice is made in hindsight, on the very activations that
are judged. What it hits is an upper bound for every forgery of this kind, whatever was known of the
model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verify.toploc.codec import MalformedProof, Proof, parse_proof
from verify.toploc.field import canonical, evaluate
from verify.toploc.selection import (
    MAGNITUDE,
    TOP_K,
    Selection,
    blocks,
    injective_moduli,
    select,
    split,
)

RADII = (8, 32)
"""Units in the last place within which a claim hits: 8 for bfloat16's rounding, 32 for fp8's."""
GRANTED_CELLS = 2 * TOP_K
_OFFSET = 1 << 16  # makes ordered values positive
_CHANNEL = 1 << 18  # beyond them and any radius


def guessable(selection: Selection, ordered: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return how many positions the best whole-channel forgery would hit, chosen in hindsight.

    Args:
        selection: the largest activations of C chunks.
        ordered: i64 [C, 128], their bits as integers in the order of the numbers.
        widths: i64 [C], hidden size of each chunk.

    Returns:
        i64 [C, radii], at most k.
    """
    count = len(widths)
    channels = np.where(selection.used, selection.indices % widths[:, None], widths[:, None])
    chunk = np.arange(count)[:, None]
    stride = int(widths.max()) + 1
    keys = np.sort(((chunk * stride + channels) * _CHANNEL + ordered + _OFFSET), axis=1).reshape(-1)
    channel = keys // _CHANNEL
    starts = np.flatnonzero(np.diff(channel, prepend=-1))
    owner, of_unused = np.divmod(channel[starts], stride)
    rank = np.arange(len(starts)) - np.searchsorted(owner, np.arange(count))[owner]
    granted = _granted_channels(selection.sizes, widths)
    best = np.empty((count, len(RADII)), np.int64)
    for column, radius in enumerate(RADII):
        inside = np.searchsorted(keys, keys + 2 * radius, side="right") - np.arange(len(keys))
        most = np.maximum.reduceat(inside, starts)
        most[of_unused == widths[owner]] = 0
        by_channel = np.zeros((count, TOP_K), np.int64)
        by_channel[owner, rank] = -most
        by_channel.sort(axis=1)
        sums = -by_channel.cumsum(axis=1)
        best[:, column] = sums[np.arange(count), granted - 1]
    return best


@dataclass(frozen=True)
class NullTest:
    """Test of a chunk against guessing."""

    radius: int
    """Index into `RADII`."""
    allowed: int
    """Positions that may be further off than the radius."""
    bits: float
    """Bits that passing is worth (`bits_against_guessing`)."""


def null_test(
    k: int,
    elements: int,
    guesses: tuple[int, ...],
    *,
    shares: tuple[float, float],
    noise: float,
    enough_bits: float,
) -> NullTest:
    """Return the most lenient test of a chunk that is worth enough bits, or else the strictest.

    Args:
        k: positions that are judged.
        elements: of the chunk.
        guesses: `ChunkStatistics.guessable`.
        shares: of k, that may miss: at least (what honest claims need), and at most.
        noise: median error that honest claims may have, units in the last place.
        enough_bits: see above.

    Returns:
        The bits are 0 where noise exceeds every radius, and where k is more than half of the chunk,
        so that its smallest are near 0.
    """
    least, most = (math.floor(share * k) for share in shares)
    usable = [i for i, radius in enumerate(RADII) if noise <= radius]
    if not usable or elements < 2 * k:
        return NullTest(0, least, 0.0)
    for index in reversed(usable):
        for allowed in range(most, least - 1, -1) if index == usable[0] else [most]:
            bits = bits_against_guessing(k, guesses[index], k - allowed)
            if bits >= enough_bits:
                return NullTest(index, allowed, bits)
    index = usable[0]
    return NullTest(index, least, bits_against_guessing(k, guesses[index], k - least))


def _granted_channels(sizes: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return the whole channels in 256 cells, rounded up: 8 of a full chunk, more of a short."""
    rows = np.maximum(sizes // widths, 1)
    return np.minimum(-(-GRANTED_CELLS // rows), TOP_K)


def bits_against_guessing(k: int, hits: int, required: int) -> float:
    """-log2 of the chance that a forgery hits `required` of k positions, if it expects `hits`.

    The Chernoff bound of a binomial, k KL(required / k || hits / k): it holds as it stands where
    hits at different positions are independent or negatively dependent. 0 where the bound is void.
    """
    rate, floor = hits / k, required / k
    if rate >= floor:
        return 0.0
    if rate == 0:
        return math.inf
    missed = (1 - floor) * math.log2((1 - floor) / (1 - rate)) if floor < 1 else 0.0
    return k * (floor * math.log2(floor / rate) + missed)


_EXPONENT, _MANTISSA, _SIGN = 0x7F80, 0x007F, 0x8000
_FAR = 1 << 17  # beyond any distance between two bf16


@dataclass(frozen=True)
class ChunkStatistics:
    """Disagreement of one proof with the top k activations of the recomputed chunk.

    Exponent mismatches, mean and median mantissa error are the published ones (arXiv 2501.16007).
    Each number but the first two grows with the error, except `constant_error`.
    """

    k: int
    elements: int
    """Activations in the chunk, of which k are judged."""
    exponent_mismatches: int
    """Positions whose exponents differ."""
    mantissa_error_mean: float
    """Mean |difference of the 7 mantissa bits| where exponents agree; inf where none do."""
    mantissa_error_median: float
    """Upper median of the same."""
    sign_mismatches: int
    """Positions whose exponents agree and whose signs do not."""
    error_median: float
    """Upper median over the k positions of the distance in units in the last place, signs counted.
    """
    constant_error: float
    """The least `error_median` that one magnitude for all positions could reach, signs given."""
    modulus_gap: int
    """How far the claimed modulus lies below the largest that keeps the recomputed positions
    distinct; 0 where it does not."""
    missing_terms: int
    """k - 1 less the polynomial's degree: 0 but for one honest proof in 65497; 0 also where all k
    activations are alike, as then it is a constant."""
    misses: tuple[int, ...]
    """Positions whose claim is further off than each of `RADII`, in units in the last place.
    """
    guessable: tuple[int, ...]
    """Positions that a forger who knew the model would hit within each of them (`guessable`)."""


def verify_proofs(hidden_bits: np.ndarray, proofs: Sequence[bytes]) -> list[ChunkStatistics]:
    """Compares the proofs of one rollout with recomputed activations.

    Args:
        hidden_bits: u16 [n, D], as for `build_proofs`.
        proofs: as a worker sent them, one for each 32 rows begun.

    Raises:
        MalformedProof: a proof that is none, or too few or too many.
    """
    result = verify_proofs_batch([hidden_bits], [proofs])[0]
    if isinstance(result, MalformedProof):
        raise result
    return result


def verify_proofs_batch(
    rollouts: Sequence[np.ndarray],
    proofs: Sequence[Sequence[bytes]],
) -> list[list[ChunkStatistics] | MalformedProof]:
    """`verify_proofs` of many rollouts at once, which is cheaper than one by one.

    Args:
        rollouts, proofs: of each rollout, as for `verify_proofs`.

    Returns:
        For each rollout its statistics, or why its proofs are malformed: one worker's bad bytes
        do not cost the others their result.
    """
    chunks = [split(hidden) for hidden in rollouts]
    parsed = [_parse(own, sent) for own, sent in zip(chunks, proofs, strict=True)]
    judged = [
        (chunk, (proof, hidden.shape[1]))
        for hidden, c, p in zip(rollouts, chunks, parsed, strict=True)
        if not isinstance(p, MalformedProof)
        for chunk, proof in zip(c, p, strict=True)
    ]
    claims = iter([claim for _, claim in judged])
    found = iter(
        [
            statistics
            for block in blocks([chunk for chunk, _ in judged])
            for statistics in _compare(block, [next(claims) for _ in block])
        ]
    )
    return [p if isinstance(p, MalformedProof) else [next(found) for _ in p] for p in parsed]


def _parse(chunks: list[np.ndarray], proofs: Sequence[bytes]) -> list[Proof] | MalformedProof:
    if len(proofs) != len(chunks):
        return MalformedProof(f"{len(proofs)} proofs for {len(chunks)} chunks")
    try:
        return [parse_proof(p, k=min(TOP_K, c.size)) for c, p in zip(chunks, proofs, strict=True)]
    except MalformedProof as error:
        return error


def _compare(chunks: list[np.ndarray], claims: list[tuple[Proof, int]]) -> list[ChunkStatistics]:
    """Compare C chunks with their proofs.

    Args:
        chunks: u16 bits, flat.
        claims: of each chunk its proof and the hidden size.
    """
    selection = select(chunks)
    true, used, k = selection.bits, selection.used, selection.k
    moduli = np.array([proof.modulus for proof, _ in claims])
    coefficients = np.stack([proof.coefficients for proof, _ in claims])
    points = selection.indices % moduli[:, None]
    claimed = canonical(evaluate(coefficients.astype(np.float64), points))
    modulus_gaps = np.maximum(injective_moduli(selection.indices) - moduli, 0)
    missing = _missing_terms(selection, coefficients)
    agree = used & ((true ^ claimed) & _EXPONENT == 0)
    agreeing = agree.sum(axis=1)
    mantissa = np.abs((true & _MANTISSA) - (claimed & _MANTISSA))
    total = np.where(agree, mantissa, 0).sum(axis=1)
    middle = _upper_median(np.where(agree, mantissa, _FAR), agreeing)
    signs = (agree & ((true ^ claimed) & _SIGN != 0)).sum(axis=1)
    ordered = _signed(true)
    distance = np.where(used, np.abs(ordered - _signed(claimed)), _FAR)
    error = _upper_median(distance, k)
    constant = _constant_error(true & MAGNITUDE, used, k)
    misses = np.stack([(used & (distance > radius)).sum(axis=1) for radius in RADII], axis=1)
    guesses = guessable(selection, ordered, np.array([width for _, width in claims]))
    guesses = np.where(_alike(selection)[:, None], k[:, None], guesses)  # a constant hits them
    return [
        ChunkStatistics(
            k=int(k[c]),
            elements=int(selection.sizes[c]),
            exponent_mismatches=int(k[c] - agreeing[c]),
            mantissa_error_mean=float(total[c] / agreeing[c]) if agreeing[c] else math.inf,
            mantissa_error_median=float(middle[c]) if agreeing[c] else math.inf,
            sign_mismatches=int(signs[c]),
            error_median=float(error[c]),
            constant_error=float(constant[c]),
            modulus_gap=int(modulus_gaps[c]),
            missing_terms=int(missing[c]),
            misses=tuple(misses[c].tolist()),
            guessable=tuple(guesses[c].tolist()),
        )
        for c in range(len(k))
    ]


def _missing_terms(selection: Selection, coefficients: np.ndarray) -> np.ndarray:
    degrees = TOP_K - 1 - np.argmax(coefficients[:, ::-1] != 0, axis=1)
    degrees[~coefficients.any(axis=1)] = 0
    return np.where(_alike(selection), 0, selection.k - 1 - degrees)


def _alike(selection: Selection) -> np.ndarray:
    """bool [C]: all k activations are one value, so that their polynomial is a constant."""
    return (~selection.used | (selection.bits == selection.bits[:, :1])).all(axis=1)


def _signed(bits: np.ndarray) -> np.ndarray:
    """bf16 bits as integers in the order of the numbers: neighbours differ by 1."""
    magnitude = bits & MAGNITUDE
    return np.where(bits & _SIGN, -magnitude, magnitude)


def _upper_median(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Element number counts // 2 of each row in ascending order."""
    middle = np.minimum(counts // 2, TOP_K - 1)
    return np.take_along_axis(np.sort(values, axis=1), middle[:, None], axis=1)[:, 0]


def _constant_error(magnitudes: np.ndarray, used: np.ndarray, k: np.ndarray) -> np.ndarray:
    """min over c of the upper median of |magnitude - c|: half the shortest span of k // 2 + 1."""
    ordered = np.sort(np.where(used, magnitudes, _FAR), axis=1)
    last = np.arange(TOP_K) + (k // 2)[:, None]
    spans = np.take_along_axis(ordered, np.minimum(last, TOP_K - 1), axis=1) - ordered
    return np.where(last < k[:, None], spans, _FAR).min(axis=1) / 2
