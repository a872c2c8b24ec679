"""Names of a run and its parts on a cluster, and the addresses that follow from them."""

from __future__ import annotations

import re

from runspec.core.errors import UserError
from runspec.core.spec.islands import island_spec
from runspec.core.spec.role_names import (
    island_processes,
    rendezvous_names,
    server_names,
    shares_name,
)
from runspec.core.spec.schema import Kubernetes, RunSpec
from runspec.local.bundle import TRUNK_GROUP
from runspec.local.site import BASE_PORT

RUN_LABEL = "runspec.dev/run"
GROUP_LABEL = "runspec.dev/group"
CHECKPOINTS = "/checkpoints"
"""Where the shared volume of the learner's full states is mounted, if the spec says nothing."""
_LABEL = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_MAX_LABEL = 63


def cluster_of(spec: RunSpec) -> Kubernetes:
    """The spec's cluster.

    Raises:
        UserError: nothing.
    """
    if spec.placement.kubernetes is None:
        raise UserError(
            "no cluster is described",
            place="placement.kubernetes",
            remedy="name at least the container image: "
            "--set placement.kubernetes.image=REGISTRY/IMAGE:TAG",
        )
    return spec.placement.kubernetes


def label(name: str) -> str:
    """A name of the spec as Kubernetes takes it.

    Raises:
        UserError: it begins or ends otherwise than names there may.
    """
    made = name.replace("_", "-")
    if not _LABEL.fullmatch(made):
        raise UserError(
            f"{name!r} cannot name anything on Kubernetes",
            place="name",
            remedy="begin with a letter, and end with a letter or a digit",
        )
    return made


def pod_host(run: str, group: str, index: int) -> str:
    """The name under which the pods of a run find one of them: JobSet's, for its headless Service.

    Args:
        run: the JobSet's name, which is its Service's too.
        group: the replicated job's name.
        index: the pod's number in its job.

    Raises:
        UserError: it would be longer than DNS allows.
    """
    host = f"{run}-{group}-0-{index}"
    if len(host) > _MAX_LABEL:
        raise UserError(
            f"a pod would be called {host}, which is {len(host)} characters; DNS allows "
            f"{_MAX_LABEL}",
            place="name",
            remedy="give the run or the role group a shorter name",
        )
    return f"{host}.{run}"


def server_ports(spec: RunSpec) -> dict[str, int]:
    """Port by server, each of which has a Service of its own: the coordinator and whoever serves
    weights or shares."""
    base = spec.placement.base_port or BASE_PORT
    ports = {name: base + i for i, name in enumerate(server_names(spec))}
    return {name: port for name, port in ports.items() if name not in rendezvous_names(spec)}


def addressed(spec: RunSpec) -> RunSpec:
    """The spec with the addresses and folders that its roles have on the cluster.

    Raises:
        UserError: it asks for what is not rendered.
    """
    cluster_of(spec)
    by_hand = "or start the roles by hand (`runspec prepare`)"
    if spec.learner.mesh.slices > 1:
        raise UserError(
            f"{spec.learner.mesh.slices} slices; the Kubernetes backend places a learner on one",
            place="learner.mesh.slices",
            remedy=f"use one slice, {by_hand}",
        )
    for name, processes in island_processes(spec).items():
        if len(processes) > 1 or island_spec(spec, name).learner.mesh.slices > 1:
            raise UserError(
                f"{len(processes)} hosts; the Kubernetes backend places an island on one",
                place=f"learner.islands.members.{name}",
                remedy=f"use one host and one slice, {by_hand}",
            )
    run, ports = label(spec.name), server_ports(spec)
    host = pod_host(run, TRUNK_GROUP, 0)

    def address(server: str) -> str:
        return f"http://{run}-{label(server)}:{ports[server]}"

    relays = [
        relay.model_copy(update={"url": relay.url or address(f"relay-{relay.name}")})
        for relay in spec.broadcast.relays
    ]
    placement: dict[str, object] = {"host": host, "backend": "kubernetes"}
    if spec.placement.metrics is not None:
        everywhere = {"host": "0.0.0.0"}  # noqa: S104 - the pod's address is known to nobody here
        placement["metrics"] = spec.placement.metrics.model_copy(update=everywhere)
    update: dict[str, object] = {
        "placement": spec.placement.model_copy(update=placement),
        "broadcast": spec.broadcast.model_copy(update={"relays": relays}),
    }
    if spec.learner.islands is not None:
        first, *others = spec.learner.islands.members
        others = [
            each.model_copy(update={"url": each.url or address(shares_name(each.name))})
            for each in others
        ]
        islands = spec.learner.islands.model_copy(update={"members": [first, *others]})
        update["learner"] = spec.learner.model_copy(update={"islands": islands})
    if spec.learner.hosts > 1 and spec.checkpoints.dir is None:
        update["checkpoints"] = spec.checkpoints.model_copy(update={"dir": CHECKPOINTS})
    return spec.model_copy(update=update)


def in_object_store(spec: RunSpec) -> bool:
    """Whether the learner's full states lie where no volume is needed."""
    return "://" in (spec.checkpoints.dir or "")
