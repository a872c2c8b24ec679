"""The batches of a run, one a step, the same in every process.

Process 0 alone waits for the batch manifest, reads the files that it names and checks them; the
others are given the arrays. So there is one batch, whatever a file system shows to whom, and only
process 0 needs the run's rollouts or documents. A batch goes to the others without pickle.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from pydantic import TypeAdapter

from learner_jax.corpus.packed import Corpus, CorpusRows, open_corpus
from learner_jax.distributed import MAX_MESSAGE_BYTES, PeerFailed, Peers, Word
from learner_jax.islands.mirror import MirroredReader
from learner_jax.learner_run import LearnerRun
from learner_jax.manifests import ManifestReader, manifest_digest, own_share
from runspec.core.errors import UserError
from runspec.core.run_files import initial_model
from verify.formats.batch import RangeManifest

B = TypeVar("B")
_LENGTH = 8
"""Bytes of the length before a batch's JSON."""
ROUND_S = 0.5
"""While process 0 waits, the processes hear of each other this often."""


@dataclass(frozen=True)
class DocumentBatch:
    """The rows of one step."""

    manifest: RangeManifest
    rows: CorpusRows

    @property
    def digest(self) -> str:
        """Digest of what the manifest says, whoever signed it when."""
        return manifest_digest(self.manifest)


class DocumentReader(ManifestReader[RangeManifest]):
    """Waits for the manifests of a run, and reads the rows that they number for this learner.

    While a step is trained, the rows of the next one are read: a manifest names the rows that
    follow those of the manifest before.

    Args:
        run: whose corpus is opened, or made.
        root_public_key: pinned; signs `keys/roles.json`.

    Raises:
        UserError: the roles or the documents cannot be read.
    """

    def __init__(self, run: LearnerRun, root_public_key: str) -> None:
        super().__init__(run.folder, run.spec, root_public_key)
        self._island = run.island
        model, cache = initial_model(run.folder), run.corpus_cache
        self.corpus: Corpus = open_corpus(run.spec, model, cache, run.log)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self._ahead: tuple[tuple[int, int], Future[CorpusRows]] | None = None

    def read(self, manifest: RangeManifest) -> DocumentBatch:
        """Read the rows that a manifest numbers for this learner."""
        share = own_share(manifest, self._island)
        asked, ahead = (share.start, share.stop), self._ahead
        found = ahead[1].result() if ahead and ahead[0] == asked else self.corpus.read(*asked)
        count = manifest.rows.last - manifest.rows.first
        following = asked[0] + count, asked[1] + count
        self._ahead = following, self._thread.submit(self.corpus.read, *following)
        return DocumentBatch(manifest, found)


def encode(batch: Any) -> bytes:
    """The bytes of a dataclass with arrays in it; `decode` gives it back bit for bit.

    They are the JSON of all but the arrays, with its length before it, and then the arrays.
    """
    arrays: list[np.ndarray] = []

    def plain(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return vars(value)
        arrays.append(value)
        return {"dtype": value.dtype.str, "shape": value.shape}

    said = json.dumps(batch, default=plain).encode()
    said += b" " * (-len(said) % _LENGTH)
    parts = (array.tobytes() for array in arrays)
    return b"".join([len(said).to_bytes(_LENGTH, "little"), said, *parts])


def decode(data: bytes, kind: type[B]) -> B:
    """Read what `encode` wrote in process 0; arrays are views of the data.

    Raises:
        ValueError, TypeError: bytes that it did not write.
    """
    at = _LENGTH + int.from_bytes(data[:_LENGTH], "little")

    def filled(value: dict[str, Any]) -> Any:
        nonlocal at
        if value.keys() != {"dtype", "shape"}:
            return value
        array = np.ndarray(value["shape"], value["dtype"], data, at)
        at += array.nbytes
        return array

    said = json.loads(data[_LENGTH:at], object_hook=filled)
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes after the last array")
    return TypeAdapter(kind).validate_python(said, strict=False)


class BatchFeed(Generic[B]):
    """Gives every process the batch of a step, or the word to end.

    Args:
        reader: reads the run's batches; None in every process but the first.
        peers: the processes.
        stop: set when this process is told to end; one that is told ends all.
        log: told of waits.
        kind: type of a batch.
    """

    def __init__(
        self,
        reader: ManifestReader[Any] | MirroredReader | None,
        peers: Peers,
        stop: threading.Event,
        log: logging.Logger,
        kind: type[B],
    ) -> None:
        self._reader, self._peers, self._stop, self._log = reader, peers, stop, log
        self._kind = kind

    def next(self, step: int, waited: Callable[[str], None]) -> B | None:
        """Collective: the batch of a step; None when a process was told to end.

        Args:
            step: its number.
            waited: told of the wait for the coordinator's manifest, and then of that for the input.

        Raises:
            UserError: in process 0, no batch in time, or one that cannot be read; a PeerFailed
                in the others.
        """
        if self._reader is not None:
            return self._read(self._reader, step, waited)
        word = Word.WAIT
        while word is Word.WAIT:
            word, size = self._peers.agree(Word.STOP if self._stop.is_set() else Word.GO)
        waited("coordinator")
        if word is Word.STOP:
            return None
        batch = decode(self._peers.broadcast(b"", size), self._kind)
        waited("input")
        return batch

    def _read(
        self,
        reader: ManifestReader[Any] | MirroredReader,
        step: int,
        waited: Callable[[str], None],
    ) -> B | None:
        """In process 0."""
        stop = _AnyStop(self._stop, self._peers)
        try:
            manifest = reader.wait(step, stop, self._log)
            waited("coordinator")
            batch = None if manifest is None else reader.read(manifest)
            sent = batch is not None and self._peers.count > 1
            data = encode(batch) if sent else b""
            if len(data) > MAX_MESSAGE_BYTES:
                raise UserError(
                    f"the batch of step {step} has {len(data)} bytes, {MAX_MESSAGE_BYTES} at most",
                    place="algorithm",
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
        waited("input")
        return batch


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
