"""Several processes that encode the documents of a corpus.

The first pieces are encoded in the process that asks, so that a small corpus starts no other.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path

from learner_jax.corpus import Counts
from learner_jax.corpus.encoding import EncodeAll, Encoded, Encoder, Piece
from runspec.core.errors import UserError
from runspec.core.process import SUPERVISOR, die_with_parent
from runspec.core.schema import RunSpec

Origin = tuple[RunSpec, Path, int]
"""Arguments of `Encoder.of`."""
Result = tuple[Encoded | None, Counts]
ALONE = 16
"""Pieces that are encoded before other processes start."""
MOST = 64
"""Processes; each has an interpreter and a tokenizer of its own, some 150 MB."""
_made: list[Encoder] = []
"""The encoder of a process that does nothing else."""


@contextmanager
def encoding(encoder: Encoder, origin: Origin) -> Iterator[EncodeAll]:
    """Give a function that encodes pieces in their order, on every core of this process.

    Args:
        encoder: of the corpus.
        origin: what the other processes make theirs of.

    Raises:
        UserError: a process has ended, as for want of memory; or as `Encoder.encode`.
    """
    count = min(len(os.sched_getaffinity(0)), MOST)
    # Not forked: JAX has threads, which a fork would leave with locks that are held.
    pool = ProcessPoolExecutor(count, get_context("spawn"), _begin, (origin, os.getpid()))

    here = iter(range(ALONE)) if count > 1 else repeat(0)

    def encode_all(pieces: Iterable[Piece]) -> Iterator[Result]:
        left = iter(pieces)
        yield from (encoder.encode(piece) for _, piece in zip(here, left, strict=False))
        waiting = deque[Future[Result]]()
        for piece in left:
            waiting.append(pool.submit(_encode, piece))
            if len(waiting) > 2 * count:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    try:
        yield encode_all
    except BrokenProcessPool as error:
        raise UserError(
            "a process that tokenizes documents has ended",
            place="data.sources",
            remedy="see the log of this role, and the kernel's for a lack of memory; start again",
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(origin: Origin, parent: int) -> None:
    os.environ[SUPERVISOR] = str(parent)
    die_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _made.append(Encoder.of(*origin))


def _encode(piece: Piece) -> Result:
    return _made[0].encode(piece)
