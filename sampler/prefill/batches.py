"""Which rollouts are computed together: those of about one length, so that little is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def batches_by_length(lengths: Sequence[int], *, positions: int) -> Iterator[list[int]]:
    """Divides rollouts into batches, the longest first.

    Args:
        lengths: tokens of each.
        positions: of a batch, its size times its longest, at most; one that is longer is alone.

    Yields:
        Indices into `lengths`.
    """
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > positions:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch
