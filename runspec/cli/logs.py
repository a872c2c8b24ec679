"""`runspec logs`, `events` and `wait`: what a run says, and when a condition of it holds."""

from __future__ import annotations

import json
import re
import sys
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path

from runspec.cli.output import reader_gone
from runspec.core.errors import BadUsage, UserError
from runspec.local.evaluations import evaluation_names, main_figure, result_line
from runspec.local.run_dir import find_run
from runspec.local.run_view import TYPES, RunView, look_at
from runspec.local.state import EventRow, RunState
from verify.formats.evaluation import Evaluated

POLL_S = 0.25
_BLOCK = 1 << 16


def logs_command(run: str, role: str | None, follow: bool, tail: int | None, runs_dir: Path) -> int:
    """Prints logs (their last `tail` lines), with `follow` until Ctrl-C; returns the exit code."""
    folder = find_run(run, runs_dir) / "logs"
    paths = _paths(folder, role)
    read = {} if tail is None else {path: _tail_start(path, tail) for path in paths}
    try:
        while True:
            for path in _paths(folder, role):
                read[path] = _print_new(path, read.get(path, 0), role is None, follow)
            if not follow or reader_gone():
                return 0
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        return 0


def _paths(folder: Path, role: str | None) -> list[Path]:
    paths = {path.stem: path for path in sorted(folder.glob("*.log"))}
    if role is not None and role not in paths:
        raise UserError(
            f"no log of role {role!r}",
            place=str(folder),
            remedy=f"one of: {', '.join(paths)}" if paths else "the run has not started yet",
        )
    return list(paths.values()) if role is None else [paths[role]]


def _tail_start(path: Path, lines: int) -> int:
    """Where the last lines of a file begin."""
    with path.open("rb") as file:
        end = start = file.seek(0, 2)
        while start > 0:
            start = max(0, start - _BLOCK)
            file.seek(start)
            data = file.read(end - start)
            if data.rstrip(b"\n").count(b"\n") >= lines:
                kept = data.splitlines(keepends=True)[-lines:] if lines else []
                return end - sum(map(len, kept))
    return 0


def _print_new(path: Path, read: int, several: bool, follow: bool) -> int:
    """Prints what a log has gained, with the role's name before each line where there are several.

    Args:
        path: the log.
        read: bytes of it that are printed already.
        several: whether other logs are printed beside it.
        follow: whether it is printed again later.

    Returns:
        Bytes of it that are printed now.
    """
    prefix = f"{path.stem:>14} | ".encode() if several else b""
    with path.open("rb") as file:
        file.seek(read)
        for line in file:
            whole = line.endswith(b"\n")
            if several and follow and not whole:
                break  # still being written; printed whole the next time
            sys.stdout.buffer.write(prefix + line + (b"" if whole or not several else b"\n"))
            read += len(line)
    sys.stdout.flush()
    return read


def events_command(run: str, follow: bool, as_json: bool, runs_dir: Path) -> int:
    """Prints events until their end, or with `follow` until Ctrl-C; returns the exit code."""
    run_dir = find_run(run, runs_dir)
    with closing(RunState(run_dir)) as state:
        try:
            last = 0
            while True:
                new = state.events(after=last)
                for event in new:
                    print(json.dumps(asdict(event)) if as_json else event_line(event), flush=True)
                if not follow or reader_gone():
                    return 0
                last = new[-1].id if new else last
                time.sleep(POLL_S)
        except KeyboardInterrupt:
            return 0


def event_line(event: EventRow) -> str:
    """One event, for people."""
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.time))
    return f"{at}  {event.role}: {event.text}"


EXIT_HOLDS, EXIT_NOT = 0, 1
POLL_S = 0.25
_COUNTED = re.compile(r"(step|version)=(\d{1,9})")
_EVALUATION = re.compile(
    r"evaluation:([a-z0-9][a-z0-9_-]*)(?:\.([a-z0-9-]+))?(>|<)(-?\d+(?:\.\d+)?)"
)
_CONDITION = re.compile(r"(?:condition=)?([A-Za-z]+)(?:=(true|false))?", re.IGNORECASE)


def wait_command(run: str, awaited: str, timeout_s: float, runs_dir: Path) -> int:
    """Waits; returns 0 when it holds, 1 when it cannot or has not in time.

    Raises:
        UserError: there is no such run or condition.
    """
    wanted = parse_awaited(awaited)
    run_dir = find_run(run, runs_dir)
    deadline = time.monotonic() + timeout_s
    while True:
        seen = look_at(run_dir, ledger=wanted.type == "SetAside")
        if holds(wanted, seen):
            why = ""
            if wanted.kind == "evaluation":
                why = f" ({result_line(next(r for r in seen.results if _beyond(wanted, r)))})"
            elif message := wanted.type and seen.conditions[wanted.type].message:
                why = f" ({message})"
            print(f"{seen.spec.name}: {wanted}{why}")
            return EXIT_HOLDS
        reason = why_never(wanted, seen)
        if reason is None and time.monotonic() >= deadline:
            reason = f"not within {timeout_s:g} s"
        if reason is not None:
            print(f"error: waited for {wanted}: {reason}", file=sys.stderr)
            print(f"  last seen: {last_seen(seen)}", file=sys.stderr)
            return EXIT_NOT
        time.sleep(POLL_S)


@dataclass(frozen=True)
class Awaited:
    """A condition with its status, or a number of steps or versions."""

    kind: str
    """`condition`, `step`, `version` or `evaluation`."""
    type: str = ""
    """Type of the condition."""
    status: str = "True"
    """Status of the condition that is awaited."""
    number: int = 0
    """Steps trained, or the version that is out."""
    figure: str = ""
    """Figure of the evaluation `type`; empty: the one that stands for it."""
    above: bool = True
    """Whether the figure must be above the limit, not below."""
    limit: float = 0.0

    def __str__(self) -> str:
        if self.kind == "condition":
            return self.type if self.status == "True" else f"{self.type}={self.status}"
        if self.kind == "evaluation":
            sign = ">" if self.above else "<"
            figure = f".{self.figure}" if self.figure else ""
            return f"evaluation:{self.type}{figure}{sign}{self.limit:g}"
        return f"{self.kind}={self.number}"


def parse_awaited(text: str) -> Awaited:
    """Reads Finished, condition=Ready, Ready=false, step=20, version=3 or evaluation:heldout>0.6.

    An evaluation may name its figure, `evaluation:heldout.pass-4>0.8`; without one it is `mean`, or
    `loss` in a run that trains on documents.

    Raises:
        BadUsage: none of these.
    """
    counted = _COUNTED.fullmatch(text)
    if counted:
        return Awaited(counted[1], number=int(counted[2]))
    if found := _EVALUATION.fullmatch(text):
        name, figure, sign, limit = found.groups()
        return Awaited(
            "evaluation", name, figure=figure or "", above=sign == ">", limit=float(limit)
        )
    named = _CONDITION.fullmatch(text)
    by_name = {type_.lower(): type_ for type_ in TYPES}
    if named and named[1].lower() in by_name:
        status = (named[2] or "true").capitalize()
        return Awaited("condition", by_name[named[1].lower()], status)
    close = get_close_matches(named[1].lower(), by_name) if named else []
    hint = f"; did you mean {by_name[close[0]]}?" if close else ""
    raise BadUsage(
        f"nothing that can be waited for: {text!r}{hint}",
        place="--for",
        remedy=f"one of {', '.join(TYPES)} (with =false: until it does not), step=N, version=N, "
        "evaluation:NAME>X, evaluation:NAME.FIGURE<X",
    )


def holds(awaited: Awaited, seen: RunView) -> bool:
    """Return whether it holds now."""
    match awaited.kind:
        case "step":
            return seen.trained >= awaited.number
        case "version":
            return seen.published is not None and seen.published >= awaited.number
        case "evaluation":
            return any(_beyond(awaited, result) for result in seen.results)
        case _:
            return seen.conditions[awaited.type].status == awaited.status


def why_never(awaited: Awaited, seen: RunView) -> str | None:
    """Return why the run cannot reach it by itself; None while it can."""
    if awaited.kind == "evaluation" and awaited.type not in evaluation_names(seen.spec):
        return f"the run has no evaluation {awaited.type!r}"
    if awaited.kind in ("step", "version") and awaited.number > seen.spec.steps:
        return f"the run has {seen.spec.steps} steps"
    if not seen.alive and seen.state in ("finished", "failed"):
        reason = f" ({seen.reason})" if seen.reason else ""
        return f"the run is {seen.state}{reason}"
    return None


def _beyond(awaited: Awaited, result: Evaluated) -> bool:
    """Return whether it is a result of the evaluation that is beyond the limit."""
    figure = result.figures.get(awaited.figure or main_figure(result))
    if result.evaluation != awaited.type or figure is None:
        return False
    return figure.value > awaited.limit if awaited.above else figure.value < awaited.limit


def last_seen(seen: RunView) -> str:
    """Return the state of a run in one line."""
    published = "none" if seen.published is None else str(seen.published)
    roles = ", ".join(f"{r.name} {r.state}" for r in seen.roles if r.state != "running")
    return (
        f"{seen.spec.name} is {seen.state}, {seen.trained} of {seen.spec.steps} steps trained, "
        f"version published: {published}{f', not running: {roles}' if roles else ''}"
    )
