"""A Ray cluster: its nodes, the trunk's node and its keeper, and the actors on the nodes.

Actors start and watch operating-system processes. These are plain classes; whoever creates them
makes Ray actors of them. An actor's methods run in the main thread of its process, one after the
other, so that Linux ends what they started with it.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from runspec.core.entry_points import install_command
from runspec.core.errors import UserError
from runspec.core.process import Endpoints
from runspec.core.schema import RunSpec
from runspec.local.backend import AT_TRUNK, Child, Look, start_child
from runspec.local.endpoints import port_answers, port_is_free
from runspec.local.processes import RoleSpec, role_specs
from runspec.local.run_dir import holder, own_folder
from runspec.local.site import TRUNK_GROUP, Group, decode_bundle, groups_of, install_role
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
    folder = own_folder(bundle.spec, bundle.group)
    folder.mkdir(parents=True, exist_ok=True)
    run = install_role(bundle, folder, order.endpoints)
    cores = None if order.cores is None else {order.name: order.cores}
    (role,) = role_specs(run, {order.name}, cores)
    return replace(role, env={**role.env, **order.secrets}), folder / "logs"


def _environment() -> dict[str, str]:
    """This node's environment without what Ray tells its own workers."""
    return {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


NAMESPACE = "runspec"
ANSWER_S = 60.0
"""How long a node that is alive may take to start an actor or to answer."""
_KNOCK_S = 5.0
_CONNECT_S = 180.0
"""How long a Ray Client server may be busy; it starts a process for each of its clients."""
_BUSY = (ConnectionError, TimeoutError, RuntimeError)
"""Error of `ray.init` where a Ray Client server does not answer in time."""
_REMEDY = "`ray start --head` makes a cluster; its address goes into placement.address"


def connect(address: str) -> Any:
    """The `ray` module, connected.

    Raises:
        UserError: Ray is not installed, or no cluster answers.
    """
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "the package ray is not installed here",
            place="placement.backend",
            remedy=install_command("ray"),
        ) from error
    address, ends = os.environ.get(AT_TRUNK, address), time.monotonic() + _CONNECT_S
    _require_listener(address)
    while not ray.is_initialized():
        try:
            ray.init(address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises what it likes
            busy = address.startswith("ray://") and isinstance(error, _BUSY)
            if not busy or time.monotonic() > ends:
                raise _no_cluster(address, " ".join(str(error).split())) from error
            time.sleep(1.0)
    return ray


def _require_listener(address: str) -> None:
    """Raises UserError at once where nobody listens; Ray itself would take half a minute."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise _no_cluster(address, str(error)) from error
    if host and port and not port_answers(host, port, _KNOCK_S):
        raise _no_cluster(address, f"nobody listens at {host}:{port}")


def _no_cluster(address: str, why: str) -> UserError:
    return UserError(
        f"no Ray cluster answers: {why[:300]}",
        place=f"placement.address {address}",
        remedy=_REMEDY,
    )


def line_of(error: Exception) -> str:
    """The informative line of an error of Ray."""
    cause = getattr(error, "cause", None)
    if isinstance(cause, UserError):
        return " ".join(str(cause).split())
    text = str(error)
    if "No module named 'runspec'" in text:
        return f"the package runspec-rl is not installed on that node: {install_command('ray')}"
    return " ".join(text.split())[:400]


def demands(spec: RunSpec, group: Group) -> dict[str, float]:
    """Return the resources that one process of a role group asks Ray for."""
    asked: dict[str, float] = dict(spec.placement.resources.get(group.name, {}))
    if group.hardware is not None and group.devices:
        asked["TPU" if group.hardware.kind.startswith("tpu") else "GPU"] = float(group.devices)
    return asked


def at_node(ip: str) -> dict[str, float]:
    """The resource that only the node of an address has; Ray names it."""
    return {f"node:{ip}": 0.001}


def options(asked: dict[str, float]) -> dict[str, Any]:
    """Return the options of an actor that asks for resources."""
    others = {name: amount for name, amount in asked.items() if name not in ("CPU", "GPU")}
    cpus, gpus = asked.get("CPU", 0), asked.get("GPU", 0)
    return {"num_cpus": cpus, "num_gpus": gpus, "resources": others}


def alive(ray: Any) -> dict[str, dict[str, Any]]:
    """The nodes that are alive, by their addresses."""
    return {node["NodeManagerAddress"]: node for node in ray.nodes() if node["Alive"]}


def choose_trunk(ray: Any, spec: RunSpec) -> str:
    """The address of a node that has what the trunk asks for.

    The first host of a TPU slice has process 0, and Ray marks it. Of several the lowest address is
    taken, so that every caller chooses alike.

    Raises:
        UserError: no node has it.
    """
    trunk = next(group for group in groups_of(spec) if group.name == TRUNK_GROUP)
    asked = demands(spec, trunk)
    fitting = [
        ip
        for ip, node in alive(ray).items()
        if all(node["Resources"].get(name, 0) >= amount for name, amount in asked.items())
        and node.get("Labels", {}).get("ray.io/tpu-worker-id", "0") == "0"
    ]
    if not fitting:
        wanted = ", ".join(f"{amount:g} {name}" for name, amount in asked.items())
        raise UserError(
            f"no node of the cluster has {wanted}, which the trunk asks for",
            place="learner.hardware",
            remedy="`ray status` lists what the nodes have",
        )
    return min(fitting)


def keeper_name(run: str, ip: str) -> str:
    return f"{run}@{ip}"


def find_keeper(ray: Any, run: str) -> str | None:
    """The address of the node that has a run's directory; None for a run that is not there."""
    for each in ray.util.list_named_actors(all_namespaces=True):
        name, _, ip = each["name"].partition("@")
        if each["namespace"] == NAMESPACE and name == run:
            return str(ip)
    return None


def keeper(ray: Any, run: str, ip: str) -> Any:
    """The handle of a run's keeper.

    Raises:
        UserError: its node is gone.
    """
    if ip not in alive(ray):
        raise UserError(
            f"the trunk's node {ip} is gone: the run waits for it, and goes on when it is back",
            place=f"run {run}",
            remedy="start that node again, with the same address and disk",
        )
    return ray.get_actor(keeper_name(run, ip), namespace=NAMESPACE)


def make_keeper(ray: Any, run: str, ip: str, run_dir: Path) -> Any:
    """Makes the keeper of a run on a node; Ray starts it again whenever that node comes back."""
    actor = ray.remote(Keeper).options(
        name=keeper_name(run, ip),
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        **options(at_node(ip)),
    )
    return actor.remote(run_dir)
