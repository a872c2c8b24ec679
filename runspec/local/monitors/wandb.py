"""Monitor that logs to Weights & Biases."""

from __future__ import annotations

import os
import shutil
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, BinaryIO

import wandb
from wandb.proto.wandb_internal_pb2 import Record

from runspec.core.errors import UserError
from runspec.local.monitors.interface import Entry, Target

_BLOCK = 32 * 1024
_HEAD = 7
"""Bytes before the first block, and before each part of a record: checksum, length, kind."""
_WHOLE, _FIRST, _LAST = 1, 2, 4
_LEFT_S = 30.0
"""How long a session that was killed may take to close its files."""


class WeightsAndBiases:
    """A run of Weights & Biases, whose id is the record's name; each restart resumes it.

    The entry's number is its `_step`. What the server has follows from the step that it resumes
    from, and what offline sessions have from their files: wandb buffers, so a killed one loses
    its newest entries, which are sent again.
    """

    def __init__(self) -> None:
        self._run: Any = None

    def start(self, target: Target) -> int:
        setting, folder = target.setting, target.folder
        folder.mkdir(parents=True, exist_ok=True)
        # Nothing of this run goes to folders of the user's; error reports go nowhere.
        os.environ.setdefault("WANDB_DATA_DIR", str(folder))
        os.environ.setdefault("WANDB_CACHE_DIR", str(folder))
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        sessions = list(folder.glob(f"wandb/*run-*-{target.record}/*.wandb"))
        _wait_until_closed(sessions, folder)
        for path in [path for path in sessions if path.stat().st_size <= _HEAD]:
            shutil.rmtree(path.parent)  # killed before it wrote anything: `wandb sync` fails at it
            sessions.remove(path)
        self._run = wandb.init(
            project=setting.project,
            id=target.record,
            name=target.record,
            dir=str(folder),
            mode=setting.mode,
            resume="allow" if setting.mode == "online" else None,
            config=dict(target.spec),
            settings=wandb.Settings(
                console="off",
                disable_code=True,
                disable_git=True,
                quiet=True,
                save_code=False,
                x_disable_meta=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("evaluations/*", step_metric="version")
        if setting.mode == "online":
            return int(self._run.starting_step)
        return 1 + max((step for path in sessions for step in _steps(path)), default=-1)

    def send(self, entry: Entry) -> None:
        values: dict[str, Any] = {entry.axis: entry.at, **entry.scalars}
        if entry.rollouts:
            # A table would be an artifact, for which the call asks the server, and can fail.
            values["rollouts"] = wandb.Html("<hr>".join(map(_rollout, entry.rollouts)))
        self._run.log(values, step=entry.number)

    def flush(self) -> None:
        """wandb sends by itself, and says only after a restart what has arrived."""

    def close(self) -> None:
        self._run.finish()


def _rollout(row: Mapping[str, Any]) -> str:
    """Return a rollout as HTML in which nothing of the model's own is HTML."""
    known = ((key, value) for key, value in row.items() if value is not None)
    return "".join(
        f"<p>{escape(key)}</p><pre>{escape(value)}</pre>"
        if isinstance(value, str)
        else f"<p>{escape(key)} {value}</p>"
        for key, value in known
    )


def _steps(path: Path) -> Iterator[int]:
    """Yield `_step` of each row of history in a .wandb file."""
    for record in records(path):
        for item in record.history.item:
            if list(item.nested_key) == ["_step"] or item.key == "_step":
                yield int(item.value_json)


def records(path: Path) -> Iterator[Record]:
    """Yield the whole records of a .wandb file."""
    with path.open("rb") as file:
        yield from map(Record.FromString, _whole(file))


def _whole(file: BinaryIO) -> Iterator[bytes]:
    """Yield the records of a .wandb file, of which the last may be torn.

    It is the log format of LevelDB: blocks of 32 KiB with parts of records, a part's head before
    each. The first block begins with seven bytes that say what the file is.
    """
    at, record = _HEAD, b""
    while block := file.read(_BLOCK):
        while at + _HEAD <= len(block):
            _, length, kind = struct.unpack_from("<IHB", block, at)
            part = block[at + _HEAD : at + _HEAD + length]
            if kind == 0 or len(part) < length:
                break  # the rest is padding, or is not written yet
            record = part if kind in (_WHOLE, _FIRST) else record + part
            at += _HEAD + length
            if kind in (_WHOLE, _LAST):
                yield record
        at = 0


def _wait_until_closed(files: Sequence[Path], folder: Path) -> None:
    """Waits for the process of a killed session, which still writes what it has."""
    deadline = time.monotonic() + _LEFT_S
    while _open_by_others({str(path) for path in files}):
        if time.monotonic() >= deadline:
            raise UserError(
                "an earlier session still writes here", place=str(folder), remedy="end wandb-core"
            )
        time.sleep(0.1)


def _open_by_others(files: set[str]) -> bool:
    return any(_target(link) in files for link in Path("/proc").glob("[0-9]*/fd/*"))


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:  # it was closed, or is another user's
        return ""
