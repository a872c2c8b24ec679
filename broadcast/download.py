"""Runs a fetch: disk work in threads while chunks arrive, under one deadline."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from functools import partial

from broadcast.assemble import Assembly, Piece, delta_applier
from broadcast.disk import in_thread
from broadcast.fetcher import PARALLEL_CHUNKS, Fetcher, for_each
from broadcast.manifest import WeightsManifest
from broadcast.upstreams import Upstreams
from runspec.core.errors import UserError

EVERY_S = 5.0
"""Seconds between two lines in the log."""
_LOG = logging.getLogger(__name__)


class Progress:
    """Counts the bytes received and logs rate, remaining time and the share of each server.

    Args:
        what: name of what is fetched.
        total: bytes to receive.
        upstreams: the servers that send them.
    """

    def __init__(self, what: str, total: int, upstreams: Upstreams) -> None:
        self._what, self._total, self._upstreams = what, total, upstreams
        self.done = self._done_before = 0
        self._at = time.monotonic()
        self._from = self._received()

    def _received(self) -> dict[str, int]:
        return {upstream.url: upstream.received for upstream in self._upstreams.all}

    async def report(self) -> None:
        """Log a line every `EVERY_S` seconds until cancelled."""
        while True:
            await asyncio.sleep(EVERY_S)
            _LOG.info("%s", self.line())

    def line(self) -> str:
        """Describe what happened since the last call."""
        now, received = time.monotonic(), self._received()
        rate = (self.done - self._done_before) / max(now - self._at, 1e-9)
        sent = {url: n - self._from[url] for url, n in received.items()}
        shares = ", ".join(
            f"{url} {n / sum(sent.values()):.0%}"
            for url, n in sorted(sent.items(), key=lambda item: -item[1])
            if n > 0
        )
        self._done_before, self._at, self._from = self.done, now, received
        return (
            f"{self._what}: {self.done / 1e6:,.1f} of {self._total / 1e6:,.1f} MB, "
            f"{rate / 1e6:,.1f} MB/s"
            + (f", {(self._total - self.done) / rate:,.0f} s left" if rate > 0 else "")
            + (f", from {shares}" if shares else ", from no server just now")
        )


async def download(
    fetcher: Fetcher, assembly: Assembly, held: Mapping[int, WeightsManifest]
) -> int:
    """Complete a version and give it its final name.

    Args:
        fetcher: requests the chunks.
        assembly: the version's files on disk; its cancellation has the deadline.
        held: versions whose files may be copied.

    Returns:
        Bytes received over the network.

    Raises:
        BadBase: see `Assembly.apply`.
        UserError: not complete in time, the disk is full, or nothing that applies deltas is
            installed.
    """
    apply_deltas = delta_applier() if assembly.recipe.deltas else None
    cancellation = assembly.cancellation
    try:
        await in_thread(partial(assembly.begin, held), cancellation)
        pieces = await in_thread(assembly.missing, cancellation)
        jobs = [
            partial(in_thread, assembly.copy_base, cancellation),
            partial(_fetch_all, fetcher, pieces, assembly),
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


async def _fetch_all(fetcher: Fetcher, pieces: Sequence[Piece], assembly: Assembly) -> None:
    total = sum(piece.chunk.size for piece in pieces)
    progress = Progress(assembly.name, total, fetcher.upstreams)
    deadline = assembly.cancellation.deadline

    async def fetch(piece: Piece) -> None:
        what = f"{piece.path.name} at byte {piece.offset}"
        await fetcher.chunk(piece.chunk, what, deadline, into=piece.path, offset=piece.offset)
        progress.done += piece.chunk.size

    reporting = asyncio.create_task(progress.report())
    try:
        await for_each(pieces, fetch, parallel=PARALLEL_CHUNKS)
    finally:
        reporting.cancel()
