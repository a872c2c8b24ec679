"""The batches of a run, one a step, the same in every process.

Process 0 alone waits for the batch manifest, reads the files that it names and checks them; the
others are given the arrays. So there is one batch, whatever a file system shows to whom, and only
process 0 needs the run's rollouts.
"""

from __future__ import annotations

import logging
import threading
import time

from learner_jax.batch import Batch, BatchReader
from learner_jax.batch_bytes import decode_batch, encode_batch
from learner_jax.distributed import MAX_MESSAGE_BYTES, PeerFailed, Peers, Word
from runspec.core.errors import UserError

ROUND_S = 0.5
"""While process 0 waits, the processes hear of each other this often."""


class BatchFeed:
    """Gives every process the batch of a step, or the word to end.

    Args:
        reader: reads the run's manifests; None in every process but the first.
        peers: the processes.
        stop: set when this process is told to end; one that is told ends all.
        log: told of waits.
    """

    def __init__(
        self,
        reader: BatchReader | None,
        peers: Peers,
        stop: threading.Event,
        log: logging.Logger,
    ) -> None:
        self._reader, self._peers, self._stop, self._log = reader, peers, stop, log

    def next(self, step: int) -> Batch | None:
        """Collective: the batch of a step; None when a process was told to end.

        Raises:
            UserError: in process 0, no batch in time, or one that cannot be read; a PeerFailed
                in the others.
        """
        return self._read(self._reader, step) if self._reader else self._follow()

    def _read(self, reader: BatchReader, step: int) -> Batch | None:
        """In process 0."""
        stop = _AnyStop(self._stop, self._peers)
        try:
            manifest = reader.wait(step, stop, self._log)
            batch = None if manifest is None else reader.read(manifest)
            data = encode_batch(batch) if batch and self._peers.count > 1 else b""
            if len(data) > MAX_MESSAGE_BYTES:
                raise UserError(
                    f"the batch of step {step} has {len(data)} bytes, {MAX_MESSAGE_BYTES} at most",
                    place="algorithm.prompts_per_step",
                    remedy="make the step smaller",
                )
        except PeerFailed:
            raise
        except UserError as error:
            self._peers.tell(error, Word.FAILED)
            raise
        if stop.agreed:
            return None
        word, size = self._peers.agree(Word.STOP if batch is None else Word.GO, len(data))
        if word is Word.STOP:
            return None
        self._peers.broadcast(data, size)
        return batch

    def _follow(self) -> Batch | None:
        """In the others."""
        word = Word.WAIT
        while word is Word.WAIT:
            word, size = self._peers.agree(Word.STOP if self._stop.is_set() else Word.GO)
        return None if word is Word.STOP else decode_batch(self._peers.broadcast(b"", size))


class _AnyStop:
    """The stop signals of all processes, as process 0 hears of them while it waits."""

    def __init__(self, own: threading.Event, peers: Peers) -> None:
        self._own, self._peers = own, peers
        self._next_round = time.monotonic() + ROUND_S
        self.agreed = False
        """Whether all know that the run ends."""

    def is_set(self) -> bool:
        return self.agreed or self._own.is_set()

    def wait(self, timeout: float) -> bool:
        """Like `threading.Event.wait`."""
        if self._own.wait(timeout):
            return True
        if self._peers.count > 1 and time.monotonic() >= self._next_round:
            self.agreed = self._peers.agree(Word.WAIT)[0] is Word.STOP
            self._next_round = time.monotonic() + ROUND_S
        return self.agreed
