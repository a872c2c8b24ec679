"""Orbax checkpoints: the parameters of each policy version, and full training states.

    params/v<N>/        params/ (Orbax, in `broadcast.dtype`) and probe.json
    state/step_<N>/     state/ (Orbax: masters, optax's state, counts) and state.json; for an
                        island beside/<name>.npy too, whole arrays in host memory

On a disk both appear by one rename. In an object store the JSON file is the marker
(`runspec.core.files`), and `learner_jax.leaves` writes and reads the arrays.

A save has two parts: the call copies the arrays to the host, and returns what writes them, which
`Saver` runs in the background, one save at a time. Arrays are chunked so that one layer of a
stacked leaf can be read alone, and are restored straight onto the shardings of the target, whatever
mesh and however many processes wrote them. Saves and restores are collective: every process of the
program calls them; process 0 makes and renames directories.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from learner_jax.leaves import (
    DEADLINE_S,
    await_all,
    copy_to_host,
    host_leaf,
    load_arrays,
    load_host_array,
    write_arrays,
)
from runspec.core import run_files
from runspec.core.canonical import MalformedJson, canonical_json
from runspec.core.errors import UserError
from runspec.core.files import Folder, ObjectPath, last_file, write_atomic
from runspec.core.run_files import ARRAYS_NAME, BESIDE_NAME, PARAMS_NAME, PROBE_FILE, RECORD_NAME

CHUNK_BYTES = 8 * 1024 * 1024
FORMAT = 3


@dataclass(frozen=True)
class StateInfo:
    """Facts of a full state. state.json holds them with a format number and the files' digests."""

    step: int
    """Rollout steps trained: the state is that of policy version `step`."""
    batch: str | None
    """Digest of the batch manifest trained last, that of `step - 1`: the data position."""
    seed: int
    """The run's: all randomness follows from it, nothing random is drawn between steps."""
    reference: str
    """Model digest of version 0, the reference policy."""
    published: bool
    """Whether the masters give the bits that version `step` was published with. False only where a
    replay elsewhere than the run began came out otherwise."""
    fingerprint: dict[str, Any]
    """`learner_jax.versions` of the program that wrote it."""
    corpus: str | None = None
    """Digest of the documents that it was trained on; None for rollouts."""
    beside: dict[str, list[Any]] = field(default_factory=dict)
    """Type and shape of each array beside the state, by name: [name of the type, [sizes]]; a save
    fills it in."""


def save_params(folder: Folder, version: int, params: Any, probe: dict[str, Any]) -> Finish:
    """Copies the parameters of a version to the host; the rest writes them with their probe.

    Args:
        folder: `params` of the run.
        version: its number; must not exist yet.
        params: the tree of arrays, in the published dtype.
        probe: see `learner_jax.versions.build_probe`.
    """

    last = json.dumps(probe).encode()
    return _save(
        folder / f"v{version}",
        PARAMS_NAME,
        params,
        PROBE_FILE,
        lambda _: last,
        {},
    )


def load_params(folder: Folder, version: int, target: Any) -> Any:
    """Reads the parameters of a version onto the shardings of `target`.

    Args:
        folder: `params` of the run.
        version: its number.
        target: tree of jax.ShapeDtypeStruct, or of arrays like those wanted.

    Raises:
        UserError: unreadable.
    """
    path = folder / f"v{version}"
    return _load(path / PARAMS_NAME, target, remedy=f"remove {path}: the learner writes it again")


def save_state(
    folder: Folder,
    info: StateInfo,
    state: Any,
    *,
    keep: int,
    also: Collection[int] = (),
    beside: Mapping[str, np.ndarray] | None = None,
) -> Finish:
    """Copies the training state to the host; the rest writes it, and drops all but the newest
    `keep` states.

    Args:
        folder: `checkpoints/state`.
        info: what it is of.
        state: tree of arrays.
        keep: full states to keep.
        also: steps whose states stay too.
        beside: arrays of process 0 that are written too, each under its name, in one of NumPy's own
            types and with one axis at least. They are not copied: they must not change until the
            save has ended.
    """

    beside = beside or {}
    kinds = {name: [str(array.dtype), list(array.shape)] for name, array in beside.items()}
    info = replace(info, beside=kinds)

    def record(directory: Folder) -> bytes:
        return canonical_json(
            {"format": FORMAT, **asdict(info), "files": run_files.file_digests(directory)}
        )

    final = folder / f"step_{info.step}"
    write = _save(final, ARRAYS_NAME, state, RECORD_NAME, record, beside)

    def finish() -> None:
        write()
        if jax.process_index() == 0:
            for old in sorted({*state_steps(folder)[:-keep]} - {*also}):
                run_files.remove_entry(folder / f"step_{old}")

    return finish


def check_state(folder: Folder, step: int) -> StateInfo:
    """Reads state.json of a full state, and compares every file of the state with it.

    Raises:
        UserError: damaged.
    """
    path = folder / f"step_{step}"
    try:
        record = run_files.record_of(path)
        if record.pop("format", None) != FORMAT:
            raise MalformedJson(f"not of format {FORMAT}")
        files = record.pop("files")
        info = StateInfo(**record)
        if info.step != step:
            raise MalformedJson(f"of step {info.step}")
    except (OSError, TypeError, KeyError, MalformedJson) as error:
        raise UserError(
            f"unreadable checkpoint: {error}",
            place=str(last_file(path, RECORD_NAME)),
            remedy=_remedy(path),
        ) from error
    if (name := run_files.damaged_file(path, files)) is not None:
        raise UserError(
            f"unreadable checkpoint: {name} is missing or not what was written",
            place=str(path),
            remedy=_remedy(path),
        )
    return info


def load_state(folder: Folder, step: int, target: Any) -> Any:
    """Reads a full state onto the shardings of `target`.

    Args:
        folder: `checkpoints/state`.
        step: one of `state_steps`.
        target: tree of jax.ShapeDtypeStruct.

    Raises:
        UserError: unreadable, or of other shapes.
    """
    path = folder / f"step_{step}"
    return _load(path / ARRAYS_NAME, target, remedy=_remedy(path))


def load_beside(folder: Folder, info: StateInfo) -> dict[str, np.ndarray]:
    """Reads the arrays that were saved beside a full state, by name.

    Args:
        folder: `checkpoints/state`.
        info: of the state.

    Raises:
        UserError: one is missing, unreadable, or of another shape or type than `info` says.
    """
    path = folder / f"step_{info.step}"
    try:
        return {
            name: _load_array(path, name, tuple(shape), np.dtype(dtype))
            for name, (dtype, shape) in info.beside.items()
        }
    except (OSError, EOFError, ValueError, TypeError) as error:
        raise UserError(
            f"unreadable checkpoint: {str(error)[:400]}",
            place=f"{path}/{BESIDE_NAME}",
            remedy=_remedy(path),
        ) from error


def _load_array(path: Folder, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    if isinstance(path, ObjectPath):
        return load_host_array(path / BESIDE_NAME, name, shape, dtype)
    # Mapped, so that its kind is compared before its data is read.
    stored = np.load(path / BESIDE_NAME / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    found, wanted = f"{stored.dtype}{stored.shape}", f"{dtype}{shape}"
    if found != wanted:
        raise ValueError(f"{name} is {found} there, {wanted} in this run")
    return np.array(stored)


def state_steps(folder: Folder) -> list[int]:
    """The steps whose full states lie in `checkpoints/state`, in order."""
    return run_files.numbered(folder, "step_")


def _context() -> ocp.Context:
    context = ocp.Context()
    saving = context.array.saving
    saving.scoped_storage_options_creator = _storage_options
    saving.use_zarr3 = True
    # Float weights hardly compress; without it a save costs a third less.
    saving.use_compression = False
    context.asynchronous.timeout_secs = int(DEADLINE_S)  # Orbax would give up after 20 minutes
    return context


def _storage_options(keys: Any, leaf: Any) -> ocp.options.ArrayOptions.Saving.StorageOptions:
    # Cut along the stacked layers; anything else, cut along axis 0, would be a chunk a row.
    stacked = any(getattr(key, "key", None) == "layers" for key in keys)
    return ocp.options.ArrayOptions.Saving.StorageOptions(
        chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if stacked else None
    )


def _save(
    final: Folder,
    name: str,
    tree: Any,
    last: str,
    content: Callable[[Folder], bytes],
    beside: Mapping[str, np.ndarray],
) -> Finish:
    """Copies `tree` to the host; the rest writes it as <final>/<name>, what goes beside it, and
    then the last file.

    What it writes to has a fixed name, on which all processes agree without a word; what a killed
    process left there was removed when this one started (`layout.clear_unfinished`).
    """
    if isinstance(final, ObjectPath):
        arrays = copy_to_host(tree)

        def finish_objects() -> None:
            with _named(final):
                write_arrays(final / name, arrays)
                if beside and jax.process_index() == 0:
                    leaves = [host_leaf(extra, array) for extra, array in beside.items()]
                    write_arrays(final / BESIDE_NAME, leaves)
                if await_all(final):
                    write_atomic(final.marker, content(final))

        return finish_objects
    temporary, first = final.with_name(f".tmp-{final.name}"), jax.process_index() == 0
    with _named(temporary):
        if first:
            temporary.mkdir(parents=True)
        with _context():
            response = ocp.save_async(temporary / name, tree)

    def finish() -> None:
        with _named(temporary):
            response.result()
            if first:
                for extra, array in beside.items():
                    (temporary / BESIDE_NAME).mkdir(exist_ok=True)
                    np.save(
                        temporary / BESIDE_NAME / f"{extra}.npy",
                        array,
                        allow_pickle=False,
                    )
                write_atomic(temporary / last, content(temporary))
                temporary.rename(final)

    return finish


@contextmanager
def _named(temporary: Folder) -> Iterator[None]:
    """Turns what goes wrong in writing into an error for people; half a checkpoint is removed from
    a disk."""
    try:
        yield
    except (OSError, ValueError) as error:  # TensorStore reports a full disk as a ValueError
        remedy = "see whether the object store can be written, then start again"
        if isinstance(temporary, Path):
            shutil.rmtree(temporary, ignore_errors=True)
            remedy = "free disk space or mend the permissions, then start again"
        raise UserError(
            f"cannot write a checkpoint: {str(error)[:400]}", place=str(temporary), remedy=remedy
        ) from error


def _remedy(path: Folder) -> str:
    return (
        f"put {path} back from a copy, or remove it to go on from the full state before it "
        "(the steps since then are trained again from their batch manifests)"
    )


def _load(path: Folder, target: Any, *, remedy: str) -> Any:
    try:
        if isinstance(path, ObjectPath):
            return load_arrays(path, target)
        with _context():
            _check_shapes(path, target)
            return ocp.load(path, target)
    except (OSError, ValueError, KeyError) as error:
        raise UserError(
            f"unreadable checkpoint: {str(error)[:400]}", place=str(path), remedy=remedy
        ) from error


def _check_shapes(path: Path, target: Any) -> None:
    """Names the leaf that differs, before any data is read."""
    stored = _shapes(ocp.metadata(path).metadata)
    wanted = _shapes(target)
    for name in sorted({*stored, *wanted}):
        if stored.get(name) != wanted.get(name):
            raise ValueError(f"{name} is {stored.get(name)} there, {wanted.get(name)} in this run")


def _shapes(tree: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{leaf.shape}"
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


REPORT_EVERY_S = 15.0

Finish = Callable[[], None]
"""The part of a save that touches no device: write, take digests, rename, drop what is old."""


class Saver:
    """Runs the saves of a run, at most one at a time; leaving its block waits for the last one.

    Args:
        log: told of waits.
    """

    def __init__(self, log: logging.Logger) -> None:
        self._log = log
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="save")
        self._save: Future[None] | None = None
        self._what = ""

    def run(self, what: str, begin: Callable[[], Finish]) -> None:
        """Begins a save, once the one before is written.

        Args:
            what: names it in messages.
            begin: copies arrays to the host, on this thread; what it returns runs on another.

        Raises:
            UserError: the save before this one failed.
        """
        self.wait()
        self._what, self._save = what, self._thread.submit(begin())

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            UserError: it could not be written, or not in time.
        """
        begun = time.monotonic()
        while self._save is not None:
            if wait([self._save], REPORT_EVERY_S).done:
                save, self._save = self._save, None
                save.result()
                return
            waited = time.monotonic() - begun
            if waited > DEADLINE_S:
                self._save = None  # given up: no later call waits for it
                raise UserError(
                    f"{self._what} is not written after {waited:.0f} s",
                    remedy="see whether the disk is full or slow, then start again",
                )
            self._log.info("%s: still being written after %.0f s", self._what, waited)

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is None:
            self.wait()
        elif isinstance(error, UserError):
            try:
                self.wait()
            except UserError as second:  # the first is the one to raise
                self._log.error("%s", second)
        self._thread.shutdown(wait=False)
