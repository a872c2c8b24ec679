"""Compares proofs with recomputed activations, and bounds the hits of a guess.

A polynomial of degree above 0 can take prescribed values, within r units in the last place, at
about 128 log(65497) / log(65497 / (2r + 1)) positions at most: 172 for r = 8, 206 for r = 32. The
reason is that there are 65497**128 polynomials, and each position leaves a share of (2r + 1) /
65497.

A forger who knows a model's statistics chooses the positions where activations are often large, and
the values that they often have there. So the bound assumes 256 cells of the chunk: whole channels,
with one signed value each. The best choice is made in hindsight, from the judged activations
themselves. Its hits are an upper bound for every forgery of this kind, whatever the forger knows of
the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verify import toploc

RADII = (8, 32)
"""Largest distances of a hit in units in the last place: 8 for bfloat16's rounding, 32 for
fp8's."""
GRANTED_CELLS = 2 * toploc.TOP_K
_OFFSET = 1 << 16  # makes ordered values positive
_CHANNEL = 1 << 18  # beyond them and any radius


def guessable(selection: toploc.Selection, ordered: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Return how many positions the best whole-channel forgery would hit, chosen in hindsight.

    Args:
        selection: the largest activations of C chunks.
        ordered: i64 [C, 128], their bits as integers in the order of the numbers (`_signed`).
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
    rows = np.maximum(selection.sizes // widths, 1)
    # Whole channels in 256 cells, rounded up: 8 for a full chunk, more for a short one.
    granted = np.minimum(-(-GRANTED_CELLS // rows), toploc.TOP_K)
    best = np.empty((count, len(RADII)), np.int64)
    for column, radius in enumerate(RADII):
        inside = np.searchsorted(keys, keys + 2 * radius, side="right") - np.arange(len(keys))
        most = np.maximum.reduceat(inside, starts)
        most[of_unused == widths[owner]] = 0
        by_channel = np.zeros((count, toploc.TOP_K), np.int64)
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
    """Number of positions that may be further off than the radius."""
    bits: float
    """Bits that passing the test is worth (`bits_against_guessing`)."""


def null_test(
    chunk: ChunkStatistics,
    *,
    shares: tuple[float, float],
    noise: float,
    enough_bits: float,
) -> NullTest:
    """Return the most lenient test of a chunk that is worth enough bits, or else the strictest.

    Args:
        chunk: the chunk, of which k positions are judged.
        shares: shares of k that may miss: the least, which honest claims need, and the most.
        noise: median error that honest claims may have, units in the last place.
        enough_bits: bits that the test should be worth.

    Returns:
        The test. Its bits are 0 if the noise exceeds every radius, or if k is more than half of the
        chunk, because its smallest activations are then near 0.
    """
    k, guesses = chunk.k, chunk.guessable
    least, most = (math.floor(share * k) for share in shares)
    usable = [i for i, radius in enumerate(RADII) if noise <= radius]
    if not usable or chunk.elements < 2 * k:
        return NullTest(0, least, 0.0)
    for index in reversed(usable):
        for allowed in range(most, least - 1, -1) if index == usable[0] else [most]:
            bits = bits_against_guessing(k, guesses[index], k - allowed)
            if bits >= enough_bits:
                return NullTest(index, allowed, bits)
    index = usable[0]
    return NullTest(index, least, bits_against_guessing(k, guesses[index], k - least))


def bits_against_guessing(k: int, hits: int, required: int) -> float:
    """Return -log2 of the chance that a forgery hits `required` of k positions if it expects
    `hits`.

    This is the Chernoff bound of a binomial, k KL(required / k || hits / k). It holds if hits at
    different positions are independent or negatively dependent. It is 0 if the bound says nothing.
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
    """Mean |difference of the 7 mantissa bits| where exponents agree; inf if none do."""
    mantissa_error_median: float
    """Upper median of the same."""
    sign_mismatches: int
    """Positions whose exponents agree and whose signs do not."""
    error_median: float
    """Upper median over the k positions of the signed values' distance, units in the last place."""
    constant_error: float
    """The least `error_median` that one magnitude for all positions could reach with right
    signs."""
    modulus_gap: int
    """Difference of the claimed modulus below the largest that keeps the recomputed positions
    distinct; 0 if it is not below."""
    missing_terms: int
    """k - 1 minus the polynomial's degree: 0 except for one honest proof in 65497. Also 0 if all k
    activations are equal, because the polynomial is then a constant."""
    misses: tuple[int, ...]
    """For each of `RADII`, the positions whose claim is further off."""
    guessable: tuple[int, ...]
    """For each of `RADII`, the positions that a forger who knows the model would hit
    (`guessable`)."""


def verify_proofs(hidden_bits: np.ndarray, proofs: Sequence[bytes]) -> list[ChunkStatistics]:
    """Compare the proofs of one rollout with recomputed activations.

    Args:
        hidden_bits: u16 [n, D], as for `build_proofs`.
        proofs: proofs that a worker sent, one for each 32 rows begun.

    Raises:
        MalformedProof: a proof is malformed, or their number is wrong.
    """
    result = verify_proofs_batch([hidden_bits], [proofs])[0]
    if isinstance(result, toploc.MalformedProof):
        raise result
    return result


def verify_proofs_batch(
    rollouts: Sequence[np.ndarray],
    proofs: Sequence[Sequence[bytes]],
) -> list[list[ChunkStatistics] | toploc.MalformedProof]:
    """Compare the proofs of many rollouts at once, which is faster than one by one.

    Args:
        rollouts, proofs: for each rollout, the arguments of `verify_proofs`.

    Returns:
        For each rollout its statistics, or why its proofs are malformed. Malformed proofs of one
        rollout do not affect the others.
    """
    chunks = [toploc.split(hidden) for hidden in rollouts]
    parsed = [_parse(own, sent) for own, sent in zip(chunks, proofs, strict=True)]
    judged = [
        (chunk, (proof, hidden.shape[1]))
        for hidden, c, p in zip(rollouts, chunks, parsed, strict=True)
        if not isinstance(p, toploc.MalformedProof)
        for chunk, proof in zip(c, p, strict=True)
    ]
    claims = iter([claim for _, claim in judged])
    found = iter(
        [
            statistics
            for block in toploc.blocks([chunk for chunk, _ in judged])
            for statistics in _compare(block, [next(claims) for _ in block])
        ]
    )
    return [p if isinstance(p, toploc.MalformedProof) else [next(found) for _ in p] for p in parsed]


def _parse(
    chunks: list[np.ndarray], proofs: Sequence[bytes]
) -> list[toploc.Proof] | toploc.MalformedProof:
    if len(proofs) != len(chunks):
        return toploc.MalformedProof(f"{len(proofs)} proofs for {len(chunks)} chunks")
    try:
        return [
            toploc.parse_proof(p, k=min(toploc.TOP_K, c.size))
            for c, p in zip(chunks, proofs, strict=True)
        ]
    except toploc.MalformedProof as error:
        return error


def _compare(
    chunks: list[np.ndarray], claims: list[tuple[toploc.Proof, int]]
) -> list[ChunkStatistics]:
    """Compare C chunks with their proofs.

    Args:
        chunks: u16 bits, flat.
        claims: of each chunk its proof and the hidden size.
    """
    selection = toploc.select(chunks)
    true, used, k = selection.bits, selection.used, selection.k
    moduli = np.array([proof.modulus for proof, _ in claims])
    coefficients = np.stack([proof.coefficients for proof, _ in claims])
    points = selection.indices % moduli[:, None]
    claimed = toploc.canonical(toploc.evaluate(coefficients.astype(np.float64), points))
    modulus_gaps = np.maximum(toploc.injective_moduli(selection.indices) - moduli, 0)
    # Whether all k activations are equal, so that the polynomial is a constant.
    alike = (~used | (true == true[:, :1])).all(axis=1)
    degrees = toploc.TOP_K - 1 - np.argmax(coefficients[:, ::-1] != 0, axis=1)
    degrees[~coefficients.any(axis=1)] = 0
    missing = np.where(alike, 0, k - 1 - degrees)
    agree = used & ((true ^ claimed) & _EXPONENT == 0)
    agreeing = agree.sum(axis=1)
    mantissa = np.abs((true & _MANTISSA) - (claimed & _MANTISSA))
    total = np.where(agree, mantissa, 0).sum(axis=1)
    middle = _upper_median(np.where(agree, mantissa, _FAR), agreeing)
    signs = (agree & ((true ^ claimed) & _SIGN != 0)).sum(axis=1)
    ordered = _signed(true)
    distance = np.where(used, np.abs(ordered - _signed(claimed)), _FAR)
    error = _upper_median(distance, k)
    constant = _constant_error(true & toploc.MAGNITUDE, used, k)
    misses = np.stack([(used & (distance > radius)).sum(axis=1) for radius in RADII], axis=1)
    guesses = guessable(selection, ordered, np.array([width for _, width in claims]))
    guesses = np.where(alike[:, None], k[:, None], guesses)  # a constant hits them
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


def _signed(bits: np.ndarray) -> np.ndarray:
    """Return bf16 bits as integers in the order of the numbers: neighbours differ by 1."""
    magnitude = bits & toploc.MAGNITUDE
    return np.where(bits & _SIGN, -magnitude, magnitude)


def _upper_median(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the element at index counts // 2 of each sorted row."""
    middle = np.minimum(counts // 2, toploc.TOP_K - 1)
    return np.take_along_axis(np.sort(values, axis=1), middle[:, None], axis=1)[:, 0]


def _constant_error(magnitudes: np.ndarray, used: np.ndarray, k: np.ndarray) -> np.ndarray:
    """Return the least upper median of |magnitude - c| over c: half the shortest span of k // 2 +
    1."""
    ordered = np.sort(np.where(used, magnitudes, _FAR), axis=1)
    last = np.arange(toploc.TOP_K) + (k // 2)[:, None]
    spans = np.take_along_axis(ordered, np.minimum(last, toploc.TOP_K - 1), axis=1) - ordered
    return np.where(last < k[:, None], spans, _FAR).min(axis=1) / 2
