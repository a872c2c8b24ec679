"""Backends: what starts and watches the processes of a run, and runs commands where the run lies.

`local` is this module's; others come by entry point (`runspec.backends`), and are imported when a
spec names them. docs/backends.md says how to write one.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Protocol

from runspec.core.entry_points import entry_points_of
from runspec.core.errors import UserError
from runspec.core.spec.schema import RunSpec
from runspec.local.children import Child, start_child, stop_children
from runspec.local.processes import PreparedRun, RoleSpec

GROUP = "runspec.backends"
LOCAL = "local"
AT_TRUNK = "RUNSPEC_AT_TRUNK"
"""Environment variable of commands that a backend runs where the run directory is: its address."""


@dataclass(frozen=True)
class Look:
    """State of a process that was started."""

    exit_code: int | None
    """Negative: the signal that ended it. None while it runs, or has no machine yet."""
    ready: bool
    """Whether it has shown a sign of life: its port answers, or, without one, it has logged."""
    pid: int | None = None
    """Where it is this machine's."""


class Processes(Protocol):
    """Starts and watches the processes of one run. The supervisor's side of a backend.

    Calls return at once: a process that has no machine yet is one that runs and is not ready.
    """

    def start(self, role: RoleSpec) -> None:
        """Starts a role that does not run.

        Raises:
            UserError: it cannot be started, and trying again would not help.
        """

    def look(self, role: str) -> Look:
        """Return the state of a role that was started, with its exit code once it has ended."""

    def stop(self, role: str, number: signal.Signals) -> None:
        """Sends a signal to a role and all that it started."""

    def logs(self) -> None:
        """Brings what roles have logged to `logs/<role>.log` of the run directory."""

    def close(self, timeout_s: float) -> None:
        """Ends what still runs."""


class Backend(Protocol):
    """Interface of an entry point of `runspec.backends`: a class made without arguments."""

    def apply(self, spec: RunSpec, detach: bool, runs_dir: Path | None) -> int:
        """Starts, changes or continues a run from the machine of whoever calls `runspec apply`.

        Returns:
            The exit code.
        """

    def command(self, site: Mapping[str, str], arguments: Sequence[str]) -> int:
        """Runs `runspec ARGUMENT...` where the run directory is, its output here.

        Args:
            site: what `apply` noted of the run, for this backend.
            arguments: of the command line.

        Returns:
            The exit code.
        """

    def processes(self, run: PreparedRun) -> tuple[Processes, PreparedRun]:
        """Return what starts the processes of a run, in the supervisor; and the run, with the
        addresses that servers have on other machines.

        Raises:
            UserError: a server has no machine in time.
        """


class LocalProcesses:
    """The children of this process, on this machine.

    Use it in the main thread: Linux ends children with the thread that started them.

    Args:
        logs: folder of the roles' logs.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._children: dict[str, Child] = {}

    def start(self, role: RoleSpec) -> None:
        self._children[role.name] = start_child(role, self._logs)

    def look(self, role: str) -> Look:
        child = self._children[role]
        code = child.exit_code()
        return Look(code, ready=code is None and child.ready(), pid=child.pid)

    def stop(self, role: str, number: signal.Signals) -> None:
        self._children[role].send(number)

    def logs(self) -> None:
        """They write them there by themselves."""

    def close(self, timeout_s: float) -> None:
        stop_children(list(self._children.values()), timeout_s)


@cache
def backend(name: str) -> Backend:
    """The backend of a name other than `local`.

    Raises:
        UserError: no installed package offers it, or it cannot be imported.
    """
    offered = {point.name: point for point in entry_points_of(GROUP)}
    if name not in offered:
        listed = ", ".join([LOCAL, *sorted(offered)])
        raise UserError(
            f"no backend {name!r}; there is {listed}",
            place="placement.backend",
            remedy="install the package that offers it",
        )
    made: Backend = offered[name].load()()
    return made


def processes_of(run: PreparedRun) -> tuple[Processes, PreparedRun]:
    """Return what starts the processes of a run by its spec; see `Backend.processes`."""
    name = run.spec.placement.backend
    if name == LOCAL:
        return LocalProcesses(run.directory / "logs"), run
    return backend(name).processes(run)
