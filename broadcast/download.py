"""Runs a fetch: disk work in threads beside the incoming chunks, under one deadline."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from broadcast.assemble import ApplyDeltas, Assembly, Piece
from broadcast.disk import Cancellation, in_thread
from broadcast.fetcher import PARALLEL_CHUNKS, Fetcher, for_each
from broadcast.manifest import WeightsManifest
from runspec.core.errors import UserError

EVERY_S = 5.0
"""Seconds between two lines in the log."""
_LOG = logging.getLogger(__name__)


class Progress:
    """Counts the bytes received and logs rate, remaining time and the share of each server.

    Args:
        what: name of what is fetched.
        total: bytes to receive.
        received: returns the bytes that each server has sent so far, over its whole life.
    """

    def __init__(
        self,
        what: str,
        total: int,
        received: Callable[[], Mapping[str, int]],
    ) -> None:
        self._what, self._total, self._received = what, total, received
        self._done = self._done_before = 0
        self._at = time.monotonic()
        self._from = dict(received())

    def add(self, size: int) -> None:
        self._done += size

    async def report(self) -> None:
        """Log a line every `EVERY_S` seconds until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            _LOG.info("%s", self.line())

    def line(self) -> str:
        """Describe what happened since the last call."""
        now, received = time.monotonic(), dict(self._received())
        rate = (self._done - self._done_before) / max(now - self._at, 1e-9)
        sent = {url: n - self._from.get(url, 0) for url, n in received.items()}
        shares = ", ".join(
            f"{url} {n / sum(sent.values()):.0%}"
            for url, n in sorted(sent.items(), key=lambda item: -item[1])
            if n > 0
        )
        self._done_before, self._at, self._from = self._done, now, received
        left_s = (self._total - self._done) / rate if rate > 0 else None
        return (
            f"{self._what}: {self._done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB, "
            f"{rate / 1e6:,.1f} MB/s"
            + (f", {left_s:,.0f} s left" if left_s is not None else "")
            + (f", from {shares}" if shares else ", from no server just now")
        )


async def download(
    fetcher: Fetcher,
    assembly: Assembly,
    held: Mapping[int, WeightsManifest],
    apply_deltas: ApplyDeltas | None,
    *,
    cancellation: Cancellation,
    deadline: float,
) -> int:
    """Make a version whole and give it its final name.

    Args:
        fetcher: requests the chunks.
        assembly: the disk side of the version.
        held: versions whose files may be copied.
        apply_deltas: applies the recipe's deltas; None if it has none.
        cancellation: the one of the assembly.
        deadline: of the monotonic clock.

    Returns:
        Bytes that came over the network.

    Raises:
        BadBase: see `Assembly.apply`.
        UserError: not whole in time, or the disk is full.
    """
    try:
        await in_thread(partial(assembly.begin, held), cancellation)
        pieces = await in_thread(assembly.missing, cancellation)
        jobs = [
            partial(in_thread, assembly.copy_base, cancellation),
            partial(_fetch_all, fetcher, pieces, assembly.name, deadline),
        ]
        await for_each(jobs, lambda job: job(), parallel=len(jobs))
        if apply_deltas is not None:
            await in_thread(partial(assembly.apply, apply_deltas), cancellation)
        await in_thread(assembly.finish, cancellation)
    except OSError as error:
        raise UserError(
            f"cannot write {assembly.name}: {error.strerror or error}",
            place=str(assembly.partial),
            remedy="free disk space or mend the permissions, then fetch again: it resumes",
        ) from error
    return sum(piece.chunk.size for piece in pieces)


async def _fetch_all(fetcher: Fetcher, pieces: Sequence[Piece], name: str, deadline: float) -> None:
    progress = Progress(
        name,
        sum(piece.chunk.size for piece in pieces),
        lambda: {upstream.url: upstream.received for upstream in fetcher.upstreams.all},
    )

    async def fetch(piece: Piece) -> None:
        what = f"{piece.path.name} at byte {piece.offset}"
        await fetcher.chunk(piece.chunk, what, deadline, into=piece.path, offset=piece.offset)
        progress.add(piece.chunk.size)

    reporting = asyncio.create_task(progress.report())
    try:
        await for_each(pieces, fetch, parallel=PARALLEL_CHUNKS)
    finally:
        reporting.cancel()
