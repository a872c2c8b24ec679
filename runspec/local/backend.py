"""Backends: what starts and watches the processes of a run, and runs commands where the run lies.

`local` is this module's: it starts, watches and signals processes of this machine. Others come by
entry point (`runspec.backends`), and are imported when a spec names them. docs/backends.md says how
to write one.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from runspec.core.entry_points import entry_points_of
from runspec.core.errors import NotNow, UserError
from runspec.core.files import FULL
from runspec.core.process import SUPERVISOR
from runspec.core.schema import RunSpec
from runspec.local.endpoints import port_answers
from runspec.local.processes import PreparedRun, RoleSpec
from runspec.local.state import RoleRow

STARTING = "--- "
"""Begins the line in a log at which a role was started."""
_TAIL_BYTES = 64 * 1024
_POLL_S = 0.05
LEFTOVER_TIMEOUT_S = 10.0
"""Seconds between SIGTERM and SIGKILL for roles that a killed supervisor left behind."""
EXIT_INTERRUPTED = 130


@dataclass
class Child:
    """A started role. It leads a process group, which goes when it goes."""

    role: RoleSpec
    process: subprocess.Popen[bytes]
    log: Path
    log_start: int
    """Size of the log when it was started."""
    answered: bool = False
    """Whether it was ready before: its port is not tried again."""

    @property
    def pid(self) -> int:
        return self.process.pid

    def exit_code(self) -> int | None:
        """Its exit code (negative: the signal that ended it), or None while it runs."""
        if self.process.returncode is None:
            ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                return None
            # Not reaped yet, so that the group still is its own: what it had started goes too.
            self.send(signal.SIGKILL)
        return self.process.wait()

    def ready(self) -> bool:
        """Whether its port answers, or, for a role without one, whether it has logged anything."""
        if not self.answered and self.role.listen is not None:
            self.answered = port_answers(*self.role.listen)
        elif not self.answered:
            self.answered = self.log.stat().st_size > self.log_start
        return self.answered

    def send(self, number: signal.Signals) -> None:
        """Signals the whole group, unless it was reaped: its number may be another's by now."""
        if self.process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)


def start_child(role: RoleSpec, logs: Path, inherited: Mapping[str, str] = os.environ) -> Child:
    """Starts a role in a process group of its own, its output appended to logs/<role>.log.

    Args:
        role: what to start.
        logs: folder of logs.
        inherited: environment beneath the role's own.

    Raises:
        NotNow: the disk is too full for the log.
        UserError: the log cannot be written or the command cannot be started.
    """
    path = logs / f"{role.name}.log"
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    try:
        with path.open("ab", buffering=0) as log:
            log.write(f"{STARTING}{stamp} starting: {shlex.join(role.command)}\n".encode())
            start = log.seek(0, os.SEEK_END)
            with pinned(role.cores):
                process = subprocess.Popen(
                    role.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env={**inherited, **role.env, SUPERVISOR: str(os.getpid())},
                    # A Ctrl-C at the terminal is for the supervisor, which stops them in order.
                    start_new_session=True,
                )
    except OSError as error:
        raise (NotNow if error.errno in FULL else UserError)(
            f"cannot start {role.name}: {error}",
            place=str(path),
            remedy="free disk space or mend what the message names, then apply again",
        ) from error
    return Child(role, process, path, start)


def end_leftovers(rows: Sequence[RoleRow]) -> None:
    """Ends the roles of a supervisor that was killed, so that no role ever runs twice.

    They die with their parent by themselves; this waits for that, and kills what hangs.

    Args:
        rows: the roles as the killed supervisor left them.
    """
    alive = [row for row in rows if row.pid and row.born and birth(row.pid) == row.born]
    for number in (signal.SIGTERM, signal.SIGKILL):
        for row in alive:
            if row.pid and birth(row.pid) == row.born:
                with suppress(ProcessLookupError):
                    os.killpg(row.pid, number)
        _await_end(lambda: all(birth(r.pid or 0) != r.born for r in alive), LEFTOVER_TIMEOUT_S)


def birth(pid: int) -> int | None:
    """When a process started, in the kernel's ticks; None where it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    state, *fields = stat[stat.rindex(")") + 2 :].split()
    return None if state == "Z" else int(fields[18])


def last_lines(path: Path, count: int) -> list[str]:
    """The last lines of a log, of at most 64 KiB."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES))
            data = file.read(_TAIL_BYTES)
    except FileNotFoundError:
        return []
    return data.decode(errors="replace").splitlines()[-count:]


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Pin processes that this thread starts in the block to cores: a child inherits the mask.

    The mask is set before the child exists, so that it sizes no thread pool by all cores.
    """
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _await_end(ended: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not ended() and time.monotonic() < deadline:
        time.sleep(_POLL_S)


class StopSignals:
    """Counts Ctrl-C, SIGTERM and hang-ups inside `with`, which else end the process."""

    _NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._count = 0
        self._before: dict[signal.Signals, Any] = {}
        self.last = ""
        """Name of the newest signal."""

    def __call__(self) -> int:
        """Return the number of signals so far."""
        return self._count

    def __enter__(self) -> StopSignals:
        self._before = {stop: signal.signal(stop, self._note) for stop in self._NUMBERS}
        return self

    def __exit__(self, *error: object) -> None:
        for stop, handler in self._before.items():
            signal.signal(stop, handler)

    def _note(self, stop: int, frame: FrameType | None) -> None:
        self._count += 1
        self.last = signal.Signals(stop).name


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
        children = self._children.values()
        for child in children:
            child.send(signal.SIGTERM)
        _await_end(lambda: all(child.exit_code() is not None for child in children), timeout_s)
        for child in children:
            if child.exit_code() is None:
                child.send(signal.SIGKILL)
                child.process.wait()


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
