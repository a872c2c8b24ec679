"""Follows a run, and sends what it shows to a tool, from the position that was noted last.

The position is in `position.json` of the monitor's folder: the newest step whose figures and whose
rollouts the tool has, and the evaluations. A tool may lose what it holds in memory when its process
is killed with ours (W&B a block of 32 KiB), so the noted position is `_BEHIND_BYTES` of entries
behind. After a kill these entries come twice, and nothing is left out.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from runspec.core.canonical import canonical_json, digest_bytes, parse_object
from runspec.core.entry_points import entry_points_of
from runspec.core.errors import UserError, describe_error
from runspec.core.files import expand_user, read_bounded, write_atomic
from runspec.core.process import EXIT_USER_ERROR, Role, not_retried, stop_event
from runspec.core.run_files import METRICS_FILE, SAMPLES_FILE, evaluation_files, monitor_folder
from runspec.core.schema import Monitor as MonitorSpec
from runspec.core.schema import RunSpec
from runspec.core.schema.load import MAX_BYTES, dump_resolved
from runspec.core.schema.role_names import monitor_names
from runspec.core.schema.source_files import MONITOR_GROUP
from runspec.local.metrics import JsonLines, Row, read_rows
from runspec.local.monitors import Entry, Monitor, Target
from runspec.local.run_dir import hold, holder
from verify.formats.documents import Evaluated, read_evaluations

POLL_S = 2.0
POSITION_FILE = "position.json"
SAMPLED_EVERY = 10
"""Steps between those whose rollouts are sent."""
_AT_ONCE = 100
"""Entries of a part."""
_BEHIND_BYTES = 128 * 1024
_MOST_SCALARS = 2000
_MOST_LETTERS = 4000
"""Of a prompt or an output."""
_EVALUATION = "evaluation:"
"""Begins the keys of evaluations."""
_AXES = ("step", "version", "time")
"""Keys of metrics.jsonl that are no figures."""
Position = dict[str, Any]
"""`record`; `number` of the next entry; `step` and `row`, the newest step and its row's digest;
`samples`, the newest step whose rollouts were sent; and when each evaluation was made, by key."""


def monitor(role: Role, log: logging.Logger) -> None:
    """Send what a monitor of the run lacks, until the run has ended."""
    settings = dict(zip(monitor_names(role.spec), role.spec.monitors, strict=True))
    follow(role.folder, role.spec, settings[role.name], stop_event(), log)


def follow(
    run_dir: Path, spec: RunSpec, setting: MonitorSpec, stop: threading.Event, log: logging.Logger
) -> None:
    """Sends until everything is sent, the run has ended, or `stop` is set.

    After a rollback another record begins, with everything that the run has.

    Raises:
        UserError: the tool failed; everything is as if this process had been killed.
        RunStopped: the tool cannot work here.
    """
    folder = monitor_folder(run_dir, setting.name)
    folder.mkdir(parents=True, exist_ok=True)
    with hold(folder, role=f"monitor-{setting.name}"):
        position = _position(folder / POSITION_FILE, run_dir, spec.name)
        feed, monitor = Feed(run_dir, position), load_monitor(setting)
        own = folder if setting.dir is None else expand_user(Path(setting.dir)).absolute()
        plain = parse_object(dump_resolved(spec), max_bytes=MAX_BYTES)
        # Before the tool has the record, so that the next start after a kill names the same one.
        write_atomic(folder / POSITION_FILE, canonical_json(position))
        with _call(setting, "start", log):
            monitor.start(Target(spec.name, position["record"], plain, setting, own))
        log.info("logs to %s from step %d on", position["record"], position["step"] + 1)
        last = [_evaluation_key(each.name, spec.steps) for each in spec.evaluations if each.at_end]
        ends, sent_bytes = False, 0
        noted = deque([(0, dict(position))])
        """Bytes that were sent until a position, and the position; the first one is written."""
        while not ends:
            # Nothing comes after what a run makes last.
            has_all = position["step"] == spec.steps - 1 and all(key in position for key in last)
            ends = stop.is_set() or holder(run_dir) is None or has_all
            new = list(feed.look(last=ends))
            for begin in range(0, len(new), _AT_ONCE):
                while len(noted) > 1 and noted[1][0] + _BEHIND_BYTES <= sent_bytes:
                    noted.popleft()
                write_atomic(folder / POSITION_FILE, canonical_json(noted[0][1]))
                with _call(setting, "send", log):
                    for entry, sent in new[begin : begin + _AT_ONCE]:
                        monitor.send(replace(entry, number=position["number"]))
                        position |= {**sent, "number": position["number"] + 1}
                        sent_bytes += len(repr(entry))
                        noted.append((sent_bytes, dict(position)))
                    monitor.flush()
            if not ends:
                stop.wait(POLL_S)
        with _call(setting, "close", log):
            monitor.close()
        write_atomic(folder / POSITION_FILE, canonical_json(position))
        log.info("%d entries sent to %s", position["number"], position["record"])


def _position(path: Path, run_dir: Path, run: str) -> Position:
    """The noted position; that of a new record where none is noted, or where the run does not have
    the newest step and the evaluations as they were sent: a rollback changes them."""
    if path.exists():
        position = parse_object(read_bounded(path, MAX_BYTES), max_bytes=MAX_BYTES)
        at = position["step"]
        row = next((row for row in read_rows(run_dir) if row["step"] == at), None)
        same = at < 0 or (row is not None and _digest(row) == position["row"])
        results = read_evaluations(evaluation_files(run_dir))
        finished = {_evaluation_key(r.evaluation, r.version): r.finished for r in results}
        sent = {key: made for key, made in position.items() if key.startswith(_EVALUATION)}
        if same and sent.items() <= finished.items():
            return position
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    record = f"{run}-{stamp}-{secrets.token_hex(4)}"
    return {"record": record, "number": 0, "step": -1, "row": "", "samples": -1}


class Feed:
    """Reads the rows, samples and evaluations that a position lacks.

    Args:
        run_dir: of the run.
        position: moved on by the caller with what it sends.
    """

    def __init__(self, run_dir: Path, position: Position) -> None:
        self._run_dir, self._position = run_dir, position
        self._metrics = JsonLines(run_dir / METRICS_FILE)
        self._samples = JsonLines(run_dir / SAMPLES_FILE)
        self._evaluations: set[Path] = set()
        self._open_step: list[dict[str, Any]] = []
        """Samples of the newest step, of which more may come."""
        self._times: dict[int, float] = {}
        """Times of the steps whose samples are sent."""

    def look(self, *, last: bool) -> Iterator[tuple[Entry, Position]]:
        """Yield each new entry, and how the position changes once it is sent.

        Args:
            last: nothing more will be written.

        Raises:
            UserError: an evaluation cannot be read.
        """
        rows = {row["step"]: row for row in self._metrics.new_rows() if _is_step(row)}
        for step, row in rows.items():
            if step % SAMPLED_EVERY == 0:
                self._times[step] = float(row.get("time") or 0.0)
            if step > self._position["step"]:
                yield step_entry(row), {"step": step, "row": _digest(row)}
        for step, found in self._sampled(last=last).items():
            if step % SAMPLED_EVERY == 0 and step > self._position["samples"]:
                yield samples_entry(step, found, self._times.get(step, 0.0)), {"samples": step}
        files = [f for f in evaluation_files(self._run_dir) if f not in self._evaluations]
        self._evaluations.update(files)
        for result in read_evaluations(files):
            key = _evaluation_key(result.evaluation, result.version)
            if key not in self._position:
                yield evaluation_entry(result), {key: result.finished}

    def _sampled(self, *, last: bool) -> dict[int, list[dict[str, Any]]]:
        """Return the samples of each step that is complete, because a later one has begun."""
        rows = [*self._open_step, *(row for row in self._samples.new_rows() if _is_step(row))]
        steps: dict[int, list[dict[str, Any]]] = {}
        for row in rows:
            steps.setdefault(row["step"], []).append(row)
        self._open_step = [] if last or not rows else steps.pop(rows[-1]["step"])
        return steps


def step_entry(row: Row) -> Entry:
    """Return the figures of a row of metrics.jsonl: numbers and truth values, nested ones too."""
    named = {key: value for key, value in row.items() if key not in _AXES}
    return Entry("step", row["step"], float(row.get("time") or 0.0), dict(_scalars(named)))


def samples_entry(step: int, rows: list[dict[str, Any]], time: float) -> Entry:
    """Return the sample rollouts of a step that was trained at a time; long texts are cut."""
    cut = tuple({key: _cut(value) for key, value in row.items() if key != "step"} for row in rows)
    return Entry("step", step, time, {}, cut)


def evaluation_entry(result: Evaluated) -> Entry:
    """Return the figures of an evaluation of a version, with the ends of their intervals."""
    name, scalars = f"evaluations/{result.evaluation}", dict[str, float]()
    for key, figure in sorted(result.figures.items()):
        ends = {"": figure.value, "/low": figure.low, "/high": figure.high}
        scalars |= {f"{name}/{key}{end}": v for end, v in ends.items() if v is not None}
    return Entry("version", result.version, float(result.finished), scalars)


def _evaluation_key(name: str, version: int) -> str:
    return f"{_EVALUATION}{name}:{version}"


def _is_step(row: Row) -> bool:
    return type(row.get("step")) is int and row["step"] >= 0


def _scalars(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for _, (key, value) in zip(range(_MOST_SCALARS), row.items(), strict=False):
        if isinstance(value, Mapping):
            yield from _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, bool | int | float):
            yield f"{prefix}{key}", float(value)


def _cut(value: Any) -> Any:
    if isinstance(value, str) and len(value) > _MOST_LETTERS:
        return f"{value[:_MOST_LETTERS]} ... ({len(value)} characters)"
    return value if isinstance(value, str | int | float) else None


def _digest(row: Row) -> str:
    return digest_bytes(json.dumps(row, sort_keys=True).encode())[:16]


@contextmanager
def _call(setting: MonitorSpec, what: str, log: logging.Logger) -> Iterator[None]:
    """Ends the process where a call hangs; turns what a plug-in raises into one message."""
    late = f"{setting.kind}: {what} takes over {setting.deadline:g} s"

    def end() -> None:
        log.error("%s: this process ends, to be started again", late)
        os._exit(EXIT_USER_ERROR)

    timer = threading.Timer(setting.deadline, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{setting.kind}: {what} failed: {describe_error(error)}",
            place=f"monitors.{setting.name}",
            remedy="the run goes on without it, and nothing is lost: mend what the message "
            "names; it is tried again by itself",
        ) from error
    finally:
        timer.cancel()


@not_retried()
def load_monitor(setting: MonitorSpec) -> Monitor:
    """Return the plug-in of a kind.

    Raises:
        RunStopped: no installed package offers it, or it cannot be imported.
    """
    offered = {point.name: point for point in entry_points_of(MONITOR_GROUP)}
    if setting.kind not in offered:
        raise UserError(
            f"no installed package offers the kind {setting.kind!r}",
            place=f"monitors.{setting.name}",
            remedy=f"one of: {', '.join(sorted(offered))}",
        )
    made: Monitor = offered[setting.kind].load()()
    return made
