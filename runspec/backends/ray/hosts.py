"""Actors on the nodes of a cluster: they start and watch operating-system processes.

These are plain classes; whoever creates them makes Ray actors of them. An actor's methods run in
the main thread of its process, one after the other, so that Linux ends what they started with it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO

from runspec.core.errors import UserError
from runspec.local.backend import AT_TRUNK, Child, Look, start_child
from runspec.local.bundle import decode_bundle, install
from runspec.local.endpoints import Endpoints, port_is_free
from runspec.local.machine import this_machine
from runspec.local.processes import PreparedRun, RoleSpec, role_specs
from runspec.local.run_dir import holder, own_folder
from runspec.local.state import RunState

MAX_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Order:
    """The inputs from which a node starts a role."""

    name: str
    bundle: bytes
    endpoints: Endpoints
    secrets: Mapping[str, str]
    cores: tuple[int, ...] | None = None
    """That it is pinned to; None: it may use all of its node's."""


class RoleHost:
    """Starts one role on its node, and watches it."""

    def __init__(self) -> None:
        self._child: Child | None = None

    def place(self, ports: Sequence[int]) -> tuple[str, int]:
        """The address of this node, and the first of the ports on which a server could listen.

        Raises:
            UserError: none of them is free.
        """
        import ray

        host = str(ray.util.get_node_ip_address())
        for port in ports:
            if port_is_free(host, port):
                return host, port
        if ports:
            raise UserError(f"none of {len(ports)} ports is free", place=f"relay at {host}")
        return host, 0

    def start(self, role: RoleSpec | Order, logs: Path | None) -> None:
        """Starts the role.

        Args:
            role: as it is, for one of the trunk; else what to make it from.
            logs: folder of its log, on the trunk's node; None: its own.

        Raises:
            UserError: the bundle, or a folder on this node.
        """
        if isinstance(role, Order):
            role, logs = _made_here(role)
        assert logs is not None, "the trunk's roles log in the run directory"
        logs.mkdir(parents=True, exist_ok=True)
        self._child = start_child(role, logs, inherited=_environment())

    def look(self, offset: int) -> tuple[Look, bytes]:
        """Return the state of the role, and its log from an offset on.

        Args:
            offset: bytes of its log that were read before, from where it was started.
        """
        child = self._child
        assert child is not None, "started before it is looked at"
        code = child.exit_code()  # before the log: an ended process has written all of it
        with child.log.open("rb") as log:
            log.seek(child.log_start + offset)
            data = log.read(MAX_READ_BYTES)
        if len(data) == MAX_READ_BYTES:
            code = None  # it is told when all of the log is read
        return Look(code, code is None and child.ready()), data

    def stop(self, number: int) -> None:
        """Signals the role and all that it started."""
        if self._child is not None:
            self._child.send(signal.Signals(number))


class Keeper:
    """Runs `runspec` commands where a run directory lies, and goes on with the run by itself after
    its node was away.

    Args:
        run_dir: the run directory, which need not be there yet.
    """

    def __init__(self, run_dir: Path) -> None:
        import ray

        context = ray.get_runtime_context()
        self._run_dir, self._address = run_dir, context.gcs_address
        self._commands: list[_Command] = []
        # Ray blocks SIGINT in its workers, and a shell's background ignores it. Commands that
        # inherited either would hear no Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        if context.was_current_actor_reconstructed:
            self._go_on()

    def _go_on(self) -> None:
        """Starts the supervisor of a run that was neither paused nor finished."""
        if not (self._run_dir / "state.db").exists() or holder(self._run_dir) is not None:
            return
        with closing(RunState(self._run_dir)) as state:
            row = state.run()
        if row is not None and row.state in ("starting", "running"):
            self.begin(["resume", str(self._run_dir), "--detach"], b"", {})

    def begin(self, arguments: Sequence[str], given: bytes, secrets: Mapping[str, str]) -> int:
        """Starts `runspec ARGUMENT...`; returns its number.

        Args:
            arguments: of the command line.
            given: its standard input.
            secrets: environment variables for it.
        """
        env = {**_environment(), **secrets, AT_TRUNK: self._address}
        self._commands.append(_Command(arguments, given, env))
        return len(self._commands) - 1

    def look(self, number: int) -> tuple[int | None, bytes, bytes]:
        """The exit code of a command once it has ended, and what it has printed since the last
        look."""
        return self._commands[number].look()

    def stop(self, number: int, signal_number: int) -> None:
        """Signals a command."""
        self._commands[number].process.send_signal(signal_number)


class _Command:
    """A `runspec` command, its output in files that nobody else can open."""

    def __init__(self, arguments: Sequence[str], given: bytes, env: Mapping[str, str]) -> None:
        self._out = tempfile.TemporaryFile()  # noqa: SIM115 - open for as long as the command
        self._err = tempfile.TemporaryFile()  # noqa: SIM115 - the same
        self._read = [0, 0]
        with tempfile.TemporaryFile() as stdin:
            stdin.write(given)
            stdin.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "runspec", *arguments],
                stdin=stdin,
                stdout=self._out,
                stderr=self._err,
                env=env,
                start_new_session=True,
            )

    def look(self) -> tuple[int | None, bytes, bytes]:
        code = self.process.poll()
        out, err = self._new(0, self._out), self._new(1, self._err)
        return (None if max(len(out), len(err)) == MAX_READ_BYTES else code), out, err

    def _new(self, which: int, file: IO[bytes]) -> bytes:
        data = os.pread(file.fileno(), MAX_READ_BYTES, self._read[which])
        self._read[which] += len(data)
        return data


def _made_here(order: Order) -> tuple[RoleSpec, Path]:
    bundle = decode_bundle(order.bundle, place=f"bundle of {order.name}")
    folder = own_folder(bundle.spec, order.name)
    folder.mkdir(parents=True, exist_ok=True)
    identity = install(bundle, folder)
    run = PreparedRun(bundle.spec, folder, order.endpoints, identity, this_machine(), lock=-1)
    cores = None if order.cores is None else {order.name: order.cores}
    (role,) = role_specs(run, {order.name}, cores)
    return replace(role, env={**role.env, **order.secrets}), folder / "logs"


def _environment() -> dict[str, str]:
    """This node's environment without what Ray tells its own workers."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
