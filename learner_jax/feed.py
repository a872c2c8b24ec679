"""The batches of a run, one a step, the same in every process.

Process 0 alone waits for the batch manifest, reads the files that it names and checks them; the
others are given the arrays. So there is one batch, whatever a file system shows to whom, and only
process 0 needs the run's rollouts or documents. A batch goes to the others without pickle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from io import BytesIO
from itertools import groupby
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from learner_jax.batch import Batch, TrainingRollout
from learner_jax.corpus.packed import Corpus, CorpusRows, open_corpus
from learner_jax.distributed import MAX_MESSAGE_BYTES, PeerFailed, Peers, Word
from learner_jax.learner_run import LearnerRun
from learner_jax.manifests import ManifestReader, StopSignal, manifest_digest, own_share
from learner_jax.packing import TokenBatch
from runspec.core.canonical import canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.run_files import initial_model
from verify.formats.batch import BatchGroup, BatchManifest, IslandShare, RangeManifest, RowRange
from verify.formats.tables import Column, Schema, decode_table, encode_table, text


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
        self._ahead: tuple[RowRange, Future[CorpusRows]] | None = None

    def read(self, manifest: RangeManifest) -> DocumentBatch:
        """Read the rows that a manifest numbers for this learner."""
        share = own_share(manifest, self._island)
        asked, ahead = RowRange(share.start, share.stop), self._ahead
        if ahead is not None and ahead[0] == asked:
            rows = ahead[1].result()
        else:
            rows = self.corpus.read(asked.first, asked.last)
        count = manifest.rows.last - manifest.rows.first
        following = RowRange(asked.first + count, asked.last + count)
        read = self._thread.submit(self.corpus.read, following.first, following.last)
        self._ahead = following, read
        return DocumentBatch(manifest, rows)


def encode_rows(rows: CorpusRows, manifest: RangeManifest | None = None) -> bytes:
    """The bytes of rows; `decode_rows` gives them back bit for bit."""
    said = b"" if manifest is None else canonical_json(asdict(manifest))
    data = BytesIO()
    arrays = {**vars(rows.batch), "weights": rows.weights}
    np.savez(data, allow_pickle=False, manifest=np.frombuffer(said, np.uint8), **arrays)
    return data.getvalue()


def encode_documents(batch: DocumentBatch) -> bytes:
    """The bytes of a batch; `decode_documents` gives it back bit for bit."""
    return encode_rows(batch.rows, batch.manifest)


def decode_rows(data: bytes) -> CorpusRows:
    """Read the rows that `encode_rows` wrote in process 0."""
    with np.load(BytesIO(data), allow_pickle=False) as found:
        names = (field.name for field in fields(TokenBatch))
        return CorpusRows(TokenBatch(*(found[name] for name in names)), found["weights"])


def decode_documents(data: bytes) -> DocumentBatch:
    """Read the batch that `encode_documents` wrote in process 0."""
    with np.load(BytesIO(data), allow_pickle=False) as found:
        said = parse_object(found["manifest"].tobytes(), max_bytes=len(data))
    rows = RowRange(**said.pop("rows"))
    shares = [IslandShare(**share) for share in said.pop("shares")]
    return DocumentBatch(RangeManifest(**said, rows=rows, shares=shares), decode_rows(data))


B = TypeVar("B")
Read = TypeVar("Read", covariant=True)
SCHEMA = Schema(
    "runspec batch 1",
    (
        text("manifest"),
        Column("group", "I32"),
        text("problem_id"),
        Column("prompt_tokens", "I32", ("index", "offsets")),
        Column("output_tokens", "I32", ("offsets",)),
        Column("mu", "F32", ("offsets",)),
        Column("advantage", "F64"),
        Column("task_reward", "F64"),
        Column("reward", "F64"),
        Column("target", "I32", ("valid",)),
        Column("version", "I32"),
    ),
)
_MAX_BYTES = 1 << 40
"""No bound: the bytes are process 0's, and `feed` bounds them."""
ROUND_S = 0.5
"""While process 0 waits, the processes hear of each other this often."""


def encode_batch(batch: Batch) -> bytes:
    """The bytes of a batch; `decode_batch` gives it back bit for bit."""
    rollouts = batch.rollouts
    names = [field.name for field in fields(TrainingRollout)]
    columns = {name: [getattr(rollout, name) for rollout in rollouts] for name in names}
    columns["manifest"] = [canonical_json(asdict(batch.manifest)).decode()] * len(rollouts)
    columns["group"] = [
        number for number, group in enumerate(batch.groups, batch.first) for _ in group
    ]
    return encode_table(columns, SCHEMA)


def decode_batch(data: bytes) -> Batch:
    """Reads a batch.

    Raises:
        MalformedTable: bytes that `encode_batch` did not make.
    """
    columns = decode_table(data, SCHEMA, max_rows=len(data), max_bytes=_MAX_BYTES)
    (manifest, *_), numbers = columns.pop("manifest"), columns.pop("group")
    said = parse_object(manifest.encode(), max_bytes=len(data))
    groups = [BatchGroup(**group) for group in said.pop("groups")]
    shares = [IslandShare(**share) for share in said.pop("shares")]
    rows = zip(numbers, zip(*columns.values(), strict=True), strict=True)
    return Batch(
        BatchManifest(**said, groups=groups, shares=shares),
        [[TrainingRollout(*row) for _, row in own] for _, own in groupby(rows, lambda row: row[0])],
        first=numbers[0],
    )


class Reader(Protocol[Read]):
    """Reads the batches of a run from its files, in process 0."""

    def wait(self, step: int, stop: StopSignal, log: logging.Logger) -> Any | None:
        """Wait for the manifest of a step; None when `stop` was set meanwhile."""

    def read(self, manifest: Any) -> Read:
        """Read what a manifest names."""


class BatchFeed(Generic[B]):
    """Gives every process the batch of a step, or the word to end.

    Args:
        reader: reads the run's batches; None in every process but the first.
        peers: the processes.
        stop: set when this process is told to end; one that is told ends all.
        log: told of waits.
        encode, decode: a batch to bytes, and back bit for bit.
    """

    def __init__(
        self,
        reader: Reader[B] | None,
        peers: Peers,
        stop: threading.Event,
        log: logging.Logger,
        encode: Callable[[B], bytes],
        decode: Callable[[bytes], B],
    ) -> None:
        self._reader, self._peers, self._stop, self._log = reader, peers, stop, log
        self._encode, self._decode = encode, decode

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
        batch = self._decode(self._peers.broadcast(b"", size))
        waited("input")
        return batch

    def _read(self, reader: Reader[B], step: int, waited: Callable[[str], None]) -> B | None:
        """In process 0."""
        stop = _AnyStop(self._stop, self._peers)
        try:
            manifest = reader.wait(step, stop, self._log)
            waited("coordinator")
            batch = None if manifest is None else reader.read(manifest)
            sent = batch is not None and self._peers.count > 1
            data = self._encode(batch) if batch is not None and sent else b""
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
