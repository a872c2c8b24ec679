"""Runs a fetch: disk work in threads beside the chunks that come, all of it under one deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from functools import partial

from broadcast.assemble import ApplyDeltas, Assembly, Piece
from broadcast.disk import Patience, in_thread
from broadcast.fetcher import PARALLEL_CHUNKS, Fetcher, for_each
from broadcast.manifest import WeightsManifest
from broadcast.progress import Progress
from runspec.core.errors import UserError

_LOG = logging.getLogger(__name__)


async def download(
    fetcher: Fetcher,
    assembly: Assembly,
    held: Mapping[int, WeightsManifest],
    apply_deltas: ApplyDeltas | None,
    *,
    patience: Patience,
    deadline: float,
) -> int:
    """Makes a version whole and gives it its final name.

    Args:
        fetcher: where chunks come from.
        assembly: of the version.
        held: versions whose files may be copied.
        apply_deltas: what applies the recipe's deltas; None where it has none.
        patience: the assembly's.
        deadline: of the monotonic clock.

    Returns:
        Bytes that came over the network.

    Raises:
        BadBase: see `Assembly.apply`.
        UserError: not whole in time, or the disk is full.
    """
    try:
        await in_thread(partial(assembly.begin, held), patience)
        pieces = await in_thread(assembly.missing, patience)
        jobs = [
            partial(in_thread, assembly.copy_base, patience),
            partial(_fetch_all, fetcher, pieces, assembly.name, deadline),
        ]
        await for_each(jobs, lambda job: job(), parallel=len(jobs))
        if apply_deltas is not None:
            await in_thread(partial(assembly.apply, apply_deltas), patience)
        await in_thread(assembly.finish, patience)
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
        _LOG,
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
