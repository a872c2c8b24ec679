"""Monitors: tools that a run logs to, each in a process that only reads the run directory.

Here is the interface of one, and what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from runspec.core.schema import Monitor as MonitorSpec


@dataclass(frozen=True)
class Target:
    """The run, and the record of it that a tool opens."""

    run: str
    """Name of the run."""
    record: str
    """Name of the record: another one after each rollback. Unique, and safe as a file's name."""
    spec: Mapping[str, Any]
    """The resolved spec, as spec.json has it."""
    setting: MonitorSpec
    folder: Path
    """Where the tool's files go."""


@dataclass(frozen=True)
class Entry:
    """One thing to send."""

    axis: Literal["step", "version"]
    """What `at` counts: trained steps, or policy versions."""
    at: int
    time: float
    """When it was made, in Unix seconds."""
    scalars: Mapping[str, float]
    """Finite figures by name; a slash divides groups of them."""
    rollouts: Sequence[Mapping[str, str | int | float | None]] = ()
    """Rows of samples.jsonl: prompt, output, rewards, ...; empty for an entry of figures."""
    number: int = 0
    """Its place in the record, from 0 on. After a kill the newest ones come again, with the numbers
    that they had."""


class Monitor(Protocol):
    """Interface of an entry point of `runspec.monitors`: a class made without arguments.

    Calls come from one thread, in this order, and any exception ends the process; it starts again
    later. A call that takes longer than the monitor's `deadline` ends the process too.
    """

    def start(self, target: Target) -> None:
        """Open a record, or open it again.

        Raises:
            RunStopped: it cannot work and trying again would not help.
        """

    def send(self, entry: Entry) -> None:
        """Log an entry."""

    def flush(self) -> None:
        """Return once everything sent would outlive this process, if the tool can tell."""

    def close(self) -> None:
        """End the session; the record can be opened again."""
