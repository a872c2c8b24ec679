"""How much of a chunk could be guessed: what a proof made without the activations may hit.

A polynomial of degree above 0 takes a prescribed value, within r units in the last place, at some
128 log(65497) / log(65497 / (2r + 1)) positions at most (there are 65497**128 polynomials; each
position leaves a share of (2r + 1) / 65497 of them): 172 for r = 8, 206 for r = 32. A forger who
knows a model's statistics puts them where it is often large, on the values that it often has there.
So a forger is granted 256 cells of the chunk: as many whole channels as make these, a signed value
for each. The best choice is made in hindsight, on the very activations that are judged, and what it
hits is an upper bound for every forgery of this kind, whatever was known of the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from verify.toploc.selection import TOP_K, Selection

RADII = (8, 32)
"""Units in the last place within which a claim hits: 8 for bfloat16's rounding, 32 for fp8's."""
GRANTED_CELLS = 2 * TOP_K
_OFFSET = 1 << 16  # makes ordered values positive
_CHANNEL = 1 << 18  # beyond them and any radius


def guessable(selection: Selection, ordered: np.ndarray, widths: np.ndarray) -> np.ndarray:
    """Positions that the best whole-channel forgery would hit, chosen in hindsight.

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
    """How a chunk is judged against guessing."""

    radius: int
    """Index into `RADII`."""
    allowed: int
    """Positions that may be off by more."""
    bits: float
    """What passing is worth: `bits_against_guessing`."""


def null_test(
    k: int,
    elements: int,
    guesses: tuple[int, ...],
    *,
    shares: tuple[float, float],
    noise: float,
    enough_bits: float,
) -> NullTest:
    """The most lenient test of a chunk that is worth enough bits; failing that, the strictest.

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
    """Whole channels in 256 cells, rounded up: 8 of a full chunk, more of a short one."""
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
