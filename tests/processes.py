"""What /proc says of processes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def descendants(pid: int | None = None) -> list[int]:
    """Children of a process (this one's by default), their children, and so on."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*"):
        if (fields := _stat(int(path.name))) is not None:
            parents[int(path.name)] = int(fields[1])
    found = [pid if pid is not None else os.getpid()]
    for one in found:
        found.extend(child for child, parent in parents.items() if parent == one)
    return found[1:]


def alive(pid: int) -> bool:
    """Whether a process runs: one that ended and was not waited for does not."""
    fields = _stat(pid)
    return fields is not None and fields[0] != "Z"


def with_word(word: str) -> set[int]:
    """Processes other than this one with a text in their command line."""
    found = set()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended
            if word in path.read_text(errors="replace"):
                found.add(int(path.parent.name))
    return found - {os.getpid()}


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and all its threads."""
    fields = _stat(pid)
    assert fields is not None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str] | None:
    """Fields of /proc/PID/stat from the state on; None where there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
