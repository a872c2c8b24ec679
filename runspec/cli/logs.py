"""`runspec logs` and `runspec events`: print what is there, or follow it as it grows."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

from runspec.cli.output import reader_gone
from runspec.core.errors import UserError
from runspec.local.run_dir import find_run
from runspec.local.state import EventRow, RunState

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
