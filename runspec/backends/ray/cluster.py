"""A Ray cluster as the others here use it: connecting, nodes, the trunk's node and its keeper."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from runspec.backends.ray.hosts import Keeper
from runspec.core.distribution import install_command
from runspec.core.errors import UserError
from runspec.core.spec.schema import RunSpec
from runspec.local.backend import AT_TRUNK
from runspec.local.bundle import TRUNK_GROUP
from runspec.local.endpoints import port_answers
from runspec.local.site import Group, groups_of

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
