"""The manifests and batches of a run, one a step, the same in every process.

The coordinator signs the manifest of each step. A run with samplers has manifests of groups
(`learner_jax.batch`), a run that trains on documents has manifests of packed rows.

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, cast

import numpy as np
from pydantic import TypeAdapter

from learner_jax.corpus.packed import Corpus, CorpusRows, open_corpus
from learner_jax.distributed import MAX_MESSAGE_BYTES, LearnerRun, PeerFailed, Peers, Word
from runspec.core.canonical import canonical_json, digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.roles import MAX_BYTES as MAX_ROLES_BYTES
from runspec.core.roles import Roles, open_roles
from runspec.core.run_files import initial_model, step_folder
from runspec.core.schema import RunSpec
from runspec.core.signed import BadSignature
from verify.formats import batch as batch_format
from verify.formats.batch import (
    BatchManifest,
    RangeManifest,
    without_empty_shares,
)

B = TypeVar("B")
_LENGTH = 8
"""Bytes of the length before a batch's JSON."""
ROUND_S = 0.5
"""While process 0 waits, the processes hear of each other this often."""
POLL_S = 0.02
REPORT_EVERY_S = 30.0
REMEDY = "see the coordinator's log; a copy of the file from before the damage mends it"
M = TypeVar("M", BatchManifest, RangeManifest)


def own_share(manifest: BatchManifest | RangeManifest, island: str | None) -> slice:
    """Return what an island trains of a step: indices of its rows or of its groups.

    Args:
        manifest: of the step.
        island: its name; None for a run with one learner, which trains all.

    Raises:
        UserError: the manifest names no share for the island.
    """
    if island is None:
        if isinstance(manifest, RangeManifest):
            return slice(manifest.rows.first, manifest.rows.last)
        return slice(len(manifest.groups))
    for share in manifest.shares:
        if share.island == island:
            return slice(share.first, share.last)
    raise UserError(
        f"the manifest of step {manifest.step} names no share of island {island}",
        place="learner.islands",
        remedy="apply the same spec to the coordinator and to every island",
    )


def manifest_digest(manifest: BatchManifest | RangeManifest) -> str:
    """BLAKE3 of a manifest's canonical JSON, without its signature."""
    return digest_bytes(canonical_json(without_empty_shares(asdict(manifest))))


class StopSignal(Protocol):
    """A `threading.Event`, as one who waits sees it."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> bool: ...


def open_manifest(
    data: bytes, *, spec: RunSpec, step: int, coordinators: frozenset[str] | None
) -> BatchManifest | RangeManifest:
    """Check the manifest of a step: of groups, or in a run on documents of rows.

    Raises:
        BadSignature: none of the coordinators signed it, or it is of another run or step.
    """
    if spec.supervised is None:
        return batch_format.open_batch(data, coordinators=coordinators, run=spec.name, step=step)
    rows = batch_format.rows_per_step(spec)
    return batch_format.open_ranges(
        data, coordinators=coordinators, run=spec.name, step=step, rows_per_step=rows
    )


class ManifestReader(Generic[M]):
    """Waits for the manifests of a run.

    Args:
        run_dir: the run directory.
        spec: its resolved spec.
        root_public_key: pinned; signs `keys/roles.json`.

    Raises:
        UserError: the run's roles cannot be read.
    """

    def __init__(self, run_dir: Path, spec: RunSpec, root_public_key: str) -> None:
        self._run_dir, self._spec = run_dir, spec
        self._root_public_key = root_public_key
        self.roles = self._read_roles()
        """The run's roles, as they are now."""

    def wait(self, step: int, stop: StopSignal, log: logging.Logger) -> M | None:
        """Waits for the manifest of a step; None when `stop` was set meanwhile.

        It waits as long as the coordinator does, which may wait for workers without end.

        Raises:
            UserError: it is not to be believed.
        """
        path = self._path(step)
        start = time.monotonic()
        report_at = start + REPORT_EVERY_S
        if stop.is_set():  # also where a replay finds one manifest after the other
            return None
        while not path.exists():
            if stop.wait(POLL_S):
                return None
            now = time.monotonic()
            if now > report_at:
                log.info("step %d: %.0f s waiting for the coordinator's batch", step, now - start)
                report_at = now + REPORT_EVERY_S
        return self.manifest(step)

    def manifest(self, step: int, *, signed: bool = True) -> M:
        """Reads and checks the manifest of a step.

        Args:
            step: its number.
            signed: whether the coordinator must have signed it.

        Raises:
            UserError: it is not the coordinator's, or breaks a promise of the spec.
        """
        path = self._path(step)
        coordinators = self.roles.coordinator if signed else None
        try:
            data = read_bounded(path, max(batch_format.MAX_BYTES, batch_format.MAX_RANGES_BYTES))
            found = open_manifest(data, spec=self._spec, step=step, coordinators=coordinators)
        except (OSError, BadSignature) as error:
            raise UserError(str(error), place=str(path), remedy=REMEDY) from error
        self._check(cast(M, found), path)
        return cast(M, found)

    def _check(self, manifest: M, path: Path) -> None:
        """Raise UserError where a manifest breaks a promise of the spec."""

    def _path(self, step: int) -> Path:
        return step_folder(self._run_dir, step) / batch_format.FILE_NAME

    def _read_roles(self) -> Roles:
        path = self._run_dir / "keys" / "roles.json"
        try:
            data = read_bounded(path, MAX_ROLES_BYTES)
            return open_roles(data, root_public_key=self._root_public_key, run=self._spec.name)
        except (OSError, BadSignature) as error:
            raise UserError(
                f"cannot read the run's roles: {error}",
                place=str(path),
                remedy="`runspec apply` makes it anew",
            ) from error


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


class Reader(Protocol):
    """Reads the batches of a run, in process 0."""

    def wait(self, step: int, stop: StopSignal, log: logging.Logger) -> Any | None:
        """Wait for the manifest of a step; None when `stop` was set meanwhile."""

    def read(self, manifest: Any) -> Any:
        """Read what a manifest names."""


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
        reader: Reader | None,
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
        reader: Reader,
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
