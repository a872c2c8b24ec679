"""Full states that the publisher publishes, from which strangers train steps again.

The run `states_run` of the store has a version for each published full state, of the same number:

    published.json  every state published before, by number, digest of its manifest, and the state
                    from which its steps can be trained again; and that of this one
    spec.json       the spec at that time
    state.tar       checkpoints/state/step_<N>/     none at version 0
    records.tar     keys/roles.json, checkpoints/fingerprints.jsonl, and since the state before
                    checkpoints/versions/v<V>.json  signed manifests of the policy versions
                    rollouts/step_<S>/              batch manifests, and the files that they name
    model.tar       initial/                        the starting model
    data.tar        data/<source>/                  documents, of a run that trains on them

Since each version lists those before, two of them show whether one was exchanged.
"""

from __future__ import annotations

import json
import logging
import tarfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tarfile import TarInfo
from time import monotonic
from typing import Any

from broadcast.layout import chunk_name, manifest_name, states_run, stored_versions
from broadcast.manifest import MAX_BYTES, open_manifest
from broadcast.store import prune, publish_objects, refresh_latest
from runspec.core import run_files
from runspec.core.canonical import canonical_json, digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.roles import RESIGN_EVERY_S
from runspec.core.schema import RunSpec
from runspec.core.schema.load import FILE_NAME as SPEC_FILE
from runspec.core.schema.source_files import source_files
from runspec.core.signed import BadSignature
from verify.formats import batch

HISTORY_FILE = "published.json"
POLL_S = 1.0
AGAIN_S = 30.0
"""Pause after a state that could not be published, for example because the disk was full."""
_NOT_NOW = (UserError, OSError, BadSignature)
_READ_BYTES = 4 * 1024 * 1024
MAX_HISTORY_BYTES = 16 * 1024 * 1024
_Files = Mapping[str, Path | bytes]


class StatePublisher:
    """Publishes full states of a run, each once the steps before it are settled.

    Args:
        run_dir: the run directory.
        spec: its resolved spec, with `audit`.
        signing: key, roles and size of chunks, as `publish_objects` takes them.
        log: told of each state.
    """

    def __init__(
        self, run_dir: Path, spec: RunSpec, signing: Mapping[str, Any], log: logging.Logger
    ) -> None:
        assert spec.audit is not None, "nothing is published without it"
        self._run_dir, self._spec, self._audit, self._log = run_dir, spec, spec.audit, log
        self._run, self._store = states_run(spec.name), run_dir / "store" / "origin"
        self._options: dict[str, Any] = {"run": self._run, "signers": "publisher", **signing}
        self._newest = max(stored_versions(self._store, self._run), default=None)

    @contextmanager
    def following(self, stop: threading.Event) -> Iterator[None]:
        """Publish states in a thread of their own, which the end of the block stops.

        Policy versions do not wait for states, which take longer.
        """
        thread = threading.Thread(target=self._follow, args=(stop,), name="states")
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _follow(self, stop: threading.Event) -> None:
        """Publish states as they appear, until `stop` is set; the last one even then."""
        last, refreshed = False, -RESIGN_EVERY_S
        while not last:
            last, pause = stop.is_set(), POLL_S
            try:
                self.publish_new()
                if monotonic() - refreshed >= RESIGN_EVERY_S:
                    refreshed, by = monotonic(), self._options
                    refresh_latest(self._store, run=self._run, key=by["key"], roles=by["roles"])
            except _NOT_NOW as error:  # policy versions are published all the same
                self._log.warning("a full state is not published: %s", error)
                pause = AGAIN_S
            stop.wait(pause)

    def publish_new(self) -> list[int]:
        """Publish the states that are due; return their numbers.

        Raises:
            UserError: one cannot be stored.
        """
        states = run_files.state_folder(self._run_dir, self._spec)
        there = [n for n in run_files.numbered(states, "step_") if self._is_wanted(n)]
        if self._newest is None:  # where the history begins, nothing is known of steps before
            there = there[-1:] or [0]
        due = [n for n in there if (self._newest is None or n > self._newest) and self._settled(n)]
        for number in due:
            self._publish(number)
        return due

    def _is_wanted(self, step: int) -> bool:
        return step % self._audit.states == 0 or step == self._spec.steps

    def _settled(self, step: int) -> bool:
        """Whether no lease is open whose rollouts are trained before a step.

        Until then its verdicts would tell a forger how close to a check's limit others came.
        """
        if not (run_files.initial_model(self._run_dir) / "config.json").exists():
            return False
        lag = 0 if self._spec.supervised is not None else self._spec.grpo.async_level
        closed = min(step + lag, self._spec.steps) - 1
        return step == 0 or self._batch(closed).exists()

    def _publish(self, number: int) -> None:
        begun, history = monotonic(), self._past()
        records = None if self._newest is None else self._records(self._newest, number)
        if records is None and self._newest is not None:
            self._log.warning("records of steps before %d are gone: a new beginning", number)
        since = None if records is None else self._newest
        names = ("keys/roles.json", f"checkpoints/{run_files.FINGERPRINTS_FILE}")
        here = {name: self._run_dir / name for name in names}
        said = {name: path.read_bytes() for name, path in here.items() if path.exists()}
        parts: dict[str, _Files] = {"records.tar": said | (records or {})}
        parts["model.tar"] = files_below(run_files.initial_model(self._run_dir), "initial")
        if number:
            folder = run_files.state_folder(self._run_dir, self._spec) / f"step_{number}"
            assert isinstance(folder, Path), "the spec's validation refuses object stores"
            parts["state.tar"] = files_below(folder, f"checkpoints/state/step_{number}")
        if self._spec.supervised is not None:
            parts["data.tar"] = {
                f"data/{source.name}/{name}": path
                for source in self._spec.data.sources
                for name, path in source_files(source).items()
            }
        contents: dict[str, Any] = {n: tar_pieces(files) for n, files in parts.items() if files}
        past = canonical_json({"states": history, "since": since})
        contents |= {HISTORY_FILE: memoryview(past), SPEC_FILE: self._run_dir / SPEC_FILE}
        digest = publish_objects(self._store, contents, version=number, **self._options)
        self._newest = number
        if self._audit.keep is not None:
            prune(self._store, run=self._run, keep_versions=self._audit.keep)
        for version in run_files.published_manifests(self._run_dir):
            if version <= number:
                run_files.published_manifest(self._run_dir, version).unlink(missing_ok=True)
        self._log.info(
            "the full state of version %d is published as %s, %.1f s",
            *(number, digest[:16], monotonic() - begun),
        )

    def _past(self) -> list[list[Any]]:
        """Number, digest and beginning of every state that was published, in order."""
        if self._newest is None:
            return []
        path = self._store / manifest_name(self._run, self._newest)
        data = read_bounded(path, MAX_BYTES)
        chunks = open_manifest(data, run=self._run, publishers=None).objects[HISTORY_FILE].chunks
        names = (chunk_name(self._run, chunk.blake3) for chunk in chunks)
        said = json.loads(b"".join((self._store / name).read_bytes() for name in names))
        return [*said["states"], [self._newest, digest_bytes(data), said["since"]]]

    def _records(self, first: int, last: int) -> dict[str, Path | bytes] | None:
        """What steps first .. last - 1 were trained on, by name; None if some of it is gone."""
        found: dict[str, Path | bytes] = {}
        for step in range(first, last):
            paths = [path := self._batch(step)]
            if path.exists() and self._spec.supervised is None:
                data = read_bounded(path, batch.MAX_BYTES)
                manifest = batch.open_batch(data, coordinators=None, run=self._spec.name, step=step)
                for group in manifest.groups:
                    files = run_files.submission_files(self._run_dir, group.step, group.submission)
                    paths += vars(files).values()
            if not all(each.exists() for each in paths):
                return None
            found |= {each.relative_to(self._run_dir).as_posix(): each for each in paths}
        for version in run_files.published_manifests(self._run_dir):
            if first < version <= last:
                path = run_files.published_manifest(self._run_dir, version)
                found[path.relative_to(self._run_dir).as_posix()] = path
        return found

    def _batch(self, step: int) -> Path:
        return run_files.step_folder(self._run_dir, step) / batch.FILE_NAME


def keep_manifest(store: Path, spec: RunSpec, version: int) -> None:
    """Keep the manifest of a policy version for replays, when the store has it no more."""
    if spec.audit is not None:
        kept = run_files.published_manifest(store.parent.parent, version)
        write_atomic(kept, read_bounded(store / manifest_name(spec.name, version), MAX_BYTES))


def files_below(folder: Path, name: str) -> dict[str, Path | bytes]:
    """Return the files below a folder by their names below `name`, in order."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    return {f"{name}/{path.relative_to(folder).as_posix()}": path for path in paths}


def tar_pieces(files: _Files) -> Iterator[bytes]:
    """Yield a tar archive of files, or of bytes, by name; equal files give equal bytes.

    Raises:
        UserError: a file changes while it is read.
    """
    for name, source in files.items():
        header = TarInfo(name)
        header.size = len(source) if isinstance(source, bytes) else source.stat().st_size
        yield header.tobuf(tarfile.PAX_FORMAT)
        left = header.size
        if isinstance(source, bytes):
            yield source
            left = 0
        else:
            with source.open("rb") as file:
                while left and (data := file.read(min(left, _READ_BYTES))):
                    left -= len(data)
                    yield data
        if left:
            raise UserError("became shorter while it was read", place=str(source))
        yield b"\0" * (-header.size % tarfile.BLOCKSIZE)
    yield b"\0" * (2 * tarfile.BLOCKSIZE)
