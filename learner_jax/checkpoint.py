"""Orbax checkpoints: the parameters of each policy version, and full training states.

    checkpoints/params/v<N>/        params/ (Orbax, in `broadcast.dtype`) and probe.json
    checkpoints/state/step_<N>/     state/ (Orbax: fp32 masters, moments, count) and state.json

Both appear by one rename. Orbax itself writes the arrays, synchronously: 50 ms for the laptop's
model. They are chunked so that one layer of a stacked leaf can be read alone, and are restored
straight onto the shardings of the target, whatever mesh wrote them.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from learner_jax.layout import PARAMS_NAME, PROBE_FILE, numbered
from runspec.common.canonical import MalformedJson, canonical_json, parse_object
from runspec.common.errors import UserError
from runspec.common.files import new_directory, read_bounded, write_atomic
from runspec.common.hashing import digest_file

STATE_NAME = "state"
STATE_FILE = "state.json"
MAX_STATE_FILE_BYTES = 64 * 1024 * 1024
CHUNK_BYTES = 8 * 1024 * 1024
FORMAT = 1


@dataclass(frozen=True)
class StateInfo:
    """state.json: what a full state is of, and the digests of its files."""

    format: int
    step: int
    """Rollout steps trained: the state is that of policy version `step`."""
    reference: str
    """Model digest of version 0, the reference policy."""
    files: dict[str, str]
    """BLAKE3 of every file under state/, by its relative path."""


def save_params(folder: Path, version: int, params: Any, probe: dict[str, Any]) -> None:
    """Writes the parameters of a version, already in the published dtype, and its probe.

    Args:
        folder: `checkpoints/params` of the run.
        version: its number; must not exist yet.
        params: the tree of arrays.
        probe: see `learner_jax.probe`.
    """
    with new_directory(folder / f"v{version}") as directory:
        _save(directory / PARAMS_NAME, params)
        write_atomic(directory / PROBE_FILE, json.dumps(probe).encode())


def load_params(folder: Path, version: int, target: Any) -> Any:
    """Reads the parameters of a version onto the shardings of `target`.

    Args:
        folder: `checkpoints/params` of the run.
        version: its number.
        target: tree of jax.ShapeDtypeStruct.

    Raises:
        UserError: unreadable.
    """
    path = folder / f"v{version}"
    return _load(path / PARAMS_NAME, target, remedy=f"remove {path}: the learner writes it again")


def save_state(folder: Path, step: int, state: Any, *, reference: str, keep: int) -> None:
    """Writes the full training state after `step` steps, then drops all but the newest `keep`.

    Args:
        folder: `checkpoints/state`.
        step: rollout steps trained.
        state: tree of arrays.
        reference: model digest of version 0.
        keep: full states to keep.
    """
    path = folder / f"step_{step}"
    if not path.exists():
        with new_directory(path) as directory:
            _save(directory / STATE_NAME, state)
            info = StateInfo(FORMAT, step, reference, _file_digests(directory / STATE_NAME))
            write_atomic(directory / STATE_FILE, canonical_json(asdict(info)))
    for old in state_steps(folder)[:-keep]:
        # Renamed first: a removal that is cut short must not leave half a state behind.
        doomed = folder / f".tmp-removed-step_{old}"
        (folder / f"step_{old}").rename(doomed)
        shutil.rmtree(doomed)


def load_state(folder: Path, step: int, target: Any, *, reference: str) -> Any:
    """Reads a full state onto the shardings of `target`.

    Args:
        folder: `checkpoints/state`.
        step: one of `state_steps`.
        target: tree of jax.ShapeDtypeStruct.
        reference: model digest of the run's version 0.

    Raises:
        UserError: damaged, or of another run's starting model.
    """
    path = folder / f"step_{step}"
    remedy = (
        f"put {path} back from a copy, or remove it to go on from the full state before it "
        "(the steps since then are trained again from their batch manifests)"
    )
    try:
        info = StateInfo(
            **parse_object(
                read_bounded(path / STATE_FILE, MAX_STATE_FILE_BYTES),
                max_bytes=MAX_STATE_FILE_BYTES,
            )
        )
    except (OSError, TypeError, MalformedJson) as error:
        raise UserError(
            f"unreadable checkpoint: {error}", place=str(path / STATE_FILE), remedy=remedy
        ) from error
    if info.format != FORMAT or info.step != step:
        raise UserError(
            f"unreadable checkpoint: format {info.format} of step {info.step}",
            place=str(path / STATE_FILE),
            remedy=remedy,
        )
    if info.reference != reference:
        raise UserError(
            f"a state of another starting model: {info.reference[:16]}, not {reference[:16]}",
            place=str(path),
            remedy="give the run another name, or delete it with `runspec delete`",
        )
    found = _file_digests(path / STATE_NAME)
    wrong = sorted(
        name for name in {*found, *info.files} if found.get(name) != info.files.get(name)
    )
    if wrong:
        raise UserError(
            f"unreadable checkpoint: {wrong[0]} is missing or not what was written",
            place=str(path),
            remedy=remedy,
        )
    return _load(path / STATE_NAME, target, remedy=remedy)


def state_steps(folder: Path) -> list[int]:
    """The steps whose full states lie in `checkpoints/state`, in order."""
    return numbered(folder, "step_")


def _context() -> ocp.Context:
    context = ocp.Context()
    saving = context.array.saving
    saving.scoped_storage_options_creator = _storage_options
    saving.use_zarr3 = True
    # Float weights hardly compress; without it a save costs a third less.
    saving.use_compression = False
    return context


def _storage_options(keys: Any, leaf: Any) -> ocp.options.ArrayOptions.Saving.StorageOptions:
    # Cut along the stacked layers; anything else, cut along axis 0, would be a chunk a row.
    stacked = any(getattr(key, "key", None) == "layers" for key in keys)
    return ocp.options.ArrayOptions.Saving.StorageOptions(
        chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if stacked else None
    )


def _save(path: Path, tree: Any) -> None:
    try:
        with _context():
            ocp.save(path, tree)
    except (OSError, ValueError) as error:  # TensorStore reports a full disk as a ValueError
        raise UserError(
            f"cannot write a checkpoint: {error}",
            place=str(path),
            remedy="free disk space or mend the permissions, then start again",
        ) from error


def _load(path: Path, target: Any, *, remedy: str) -> Any:
    try:
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
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype}{leaf.shape}"
        for path, leaf in leaves
    }


def _file_digests(root: Path) -> dict[str, str]:
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): digest_file(path) for path in paths}
