"""Names of a run on a cluster, the addresses that follow from them, and the pod of a role group."""

from __future__ import annotations

import re
from typing import Any

from runspec.core.errors import UserError
from runspec.core.models.family import model_config
from runspec.core.process import address
from runspec.core.schema import Hardware, Kubernetes, RunSpec
from runspec.core.schema.role_names import (
    island_processes,
    island_spec,
    rendezvous_names,
    server_names,
    trunk_names,
)
from runspec.local.endpoints import fixed_metrics
from runspec.local.machine import TPU_HOSTS
from runspec.local.preflight import own_disk_bytes
from runspec.local.site import BASE_PORT, SHARED, TRUNK_GROUP, Disk, Group, with_urls

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
    placement: dict[str, object] = {"host": pod_host(run, TRUNK_GROUP, 0), "backend": "kubernetes"}
    if spec.placement.metrics is not None:
        everywhere = {"host": "0.0.0.0"}  # noqa: S104 - the pod's address is known to nobody here
        placement["metrics"] = spec.placement.metrics.model_copy(update=everywhere)
    update: dict[str, object] = {"placement": spec.placement.model_copy(update=placement)}
    if spec.learner.hosts > 1 and spec.checkpoints.dir is None:
        update["checkpoints"] = spec.checkpoints.model_copy(update={"dir": CHECKPOINTS})
    located = with_urls(spec, lambda server: f"http://{run}-{label(server)}:{ports[server]}")
    return located.model_copy(update=update)


def in_object_store(spec: RunSpec) -> bool:
    """Whether the learner's full states lie where no volume is needed."""
    return "://" in (spec.checkpoints.dir or "")


ROLE, BESIDE = "role", "server"
"""Containers of a pod: of its role, and of a server beside that."""
BUNDLES, DATA, MODELS = "/etc/runspec", "/data", "/models"
"""Folders in a container: its bundle, what the role keeps, model files."""
BUNDLE = "bundle.json"
RUNS = f"{DATA}/runs"
"""Where the trunk has its run directory; warm starts are cached beside it."""
STOP_S = 120
"""Time between SIGTERM and SIGKILL, in which the trunk stops its roles in order."""
INDEX = "$(JOB_COMPLETION_INDEX)"
"""Kubernetes itself puts the pod's index here."""
_TPU_NODES = {
    "tpu-v4": "tpu-v4-podslice",
    "tpu-v5e": "tpu-v5-lite-podslice",
    "tpu-v5p": "tpu-v5p-slice",
    "tpu-v6e": "tpu-v6e-slice",
}
"""GKE's word for a kind of TPU node."""
_NODE_POOL = "cloud.google.com/gke-nodepool"


def pod(spec: RunSpec, run: str, group: Group, labels: dict[str, str]) -> dict[str, Any]:
    """The pod template's spec of a role group."""
    cluster, trunk = cluster_of(spec), group.name == TRUNK_GROUP
    folder = f"{RUNS}/{spec.name}" if trunk else DATA
    command = ["runspec", "role", "--bundle", f"{BUNDLES}/{BUNDLE}", "--dir", folder]
    container: dict[str, Any] = {
        "name": ROLE,
        "image": cluster.images.get(group.name, cluster.image),
        "command": command,
        "env": _environment(spec, run, group),
        "securityContext": _security(group),
    }
    made: dict[str, Any] = {
        "automountServiceAccountToken": False,
        # The trunk's exit code decides about the run, which the policy for failures can only read
        # of pods that are not started again in place.
        "restartPolicy": "Never" if trunk else "OnFailure",
        "terminationGracePeriodSeconds": STOP_S,
        "containers": [container],
    }
    ports = server_ports(spec)
    if trunk:
        served = {name: port for name, port in ports.items() if name in trunk_names(spec)}
        probe = {"tcpSocket": {"port": ports["coordinator"]}, "periodSeconds": 5}
        container["readinessProbe"] = probe
    else:
        served = {name: port for name, port in ports.items() if name == group.name}
    members = trunk_names(spec) if trunk else group.members
    figures = {name: address(url)[1] for name, url in fixed_metrics(spec).items()}
    open_ports = [*served.values(), *sorted({figures[name] for name in members if name in figures})]
    if open_ports:
        container["ports"] = [{"containerPort": port, "protocol": "TCP"} for port in open_ports]
    if group.name in served:
        command += ["--listen", f"0.0.0.0:{served[group.name]}"]
    _mount(made, container, spec, run, group)
    made["containers"] += [_beside(container, name, ports[name]) for name in group.beside]
    _place(made, container, spec, group, labels)
    return made


def _security(group: Group) -> dict[str, Any]:
    """The least of root's capabilities that sandboxes need, whose programs run as other users.

    The TPU's driver locks memory, which takes one more.
    """
    added = ["CHOWN", "DAC_OVERRIDE", "KILL", "SETGID", "SETUID"]
    if _is_tpu(group.hardware):
        added.append("SYS_RESOURCE")
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"], "add": added},
    }


def _beside(container: dict[str, Any], name: str, port: int) -> dict[str, Any]:
    """The container of a server beside a pod's role: the same bundle and folder."""
    role, *options = container["command"][1:]
    return {
        **{name: value for name, value in container.items() if name != "resources"},
        "name": BESIDE,
        "command": ["runspec", role, name, *options, "--listen", f"0.0.0.0:{port}"],
        "ports": [{"containerPort": port, "protocol": "TCP"}],
    }


def _environment(spec: RunSpec, run: str, group: Group) -> list[dict[str, Any]]:
    env: list[dict[str, Any]] = [
        {
            "name": variable,
            "valueFrom": {"secretKeyRef": {"name": f"{run}-env", "key": variable}},
        }
        for variable in group.secrets
    ]
    if cluster_of(spec).models is not None:
        env.append({"name": "HF_HOME", "value": MODELS})
    hosts, on_tpu = spec.learner.hosts, _is_tpu(group.hardware)
    if group.disk is not Disk.OWN and hosts > 1 and on_tpu:
        # GKE numbers the hosts of a Job, and the trunk's is another one than the learners'.
        names = [pod_host(run, TRUNK_GROUP, 0)]
        names += [pod_host(run, "learners", i) for i in range(hosts - 1)]
        env.append({"name": TPU_HOSTS, "value": ",".join(names)})
    return env


def _mount(
    made: dict[str, Any], container: dict[str, Any], spec: RunSpec, run: str, group: Group
) -> None:
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []

    def mount(name: str, path: str, read_only: bool = False, **source: object) -> None:
        volumes.append({"name": name, **source})
        mounts.append({"name": name, "mountPath": path, "readOnly": read_only})

    def claim(name: str) -> dict[str, str]:
        return {"claimName": f"{run}-{name}"}

    mount("site", f"{BUNDLES}/{SHARED}", True, configMap={"name": f"{run}-spec"})
    mount(
        "bundles", f"{BUNDLES}/{BUNDLE}", True, secret={"secretName": f"{run}-{label(group.name)}"}
    )
    mounts[-1]["subPathExpr"] = f"{INDEX}.json"  # of the group's keys a pod sees its own
    if group.disk is Disk.RUN:
        mount("run", DATA, persistentVolumeClaim=claim("run"))
    else:
        mount("own", DATA, emptyDir={})
        if (config := model_config(spec)) is not None:  # no limit: it is an estimate
            needed = str(own_disk_bytes(spec, config, group))
            container["resources"] = {"requests": {"ephemeral-storage": needed}}
    if group.disk is not Disk.OWN and spec.learner.hosts > 1 and not in_object_store(spec):
        folder = spec.checkpoints.dir
        assert folder is not None, "`addressed` says it"
        mount("checkpoints", folder, persistentVolumeClaim=claim("checkpoints"))
    models = cluster_of(spec).models
    if models is not None:
        mount("models", MODELS, True, persistentVolumeClaim={"claimName": models})
    if group.devices > 1 and not _is_tpu(group.hardware):
        # NCCL shares memory between the processes of a GPU host; containers have 64 MB by default.
        mount("shared-memory", "/dev/shm", emptyDir={"medium": "Memory"})  # noqa: S108
    made["volumes"], container["volumeMounts"] = volumes, mounts


def _place(
    made: dict[str, Any],
    container: dict[str, Any],
    spec: RunSpec,
    group: Group,
    labels: dict[str, str],
) -> None:
    """Says which nodes suit the group."""
    selector = dict(cluster_of(spec).node_selectors.get(group.name, {}))
    hardware = group.hardware
    if hardware is not None:
        tpu = _is_tpu(hardware)
        resource = "google.com/tpu" if tpu else "nvidia.com/gpu"
        container.setdefault("resources", {})["limits"] = {resource: str(group.devices)}
        if tpu:
            node = _TPU_NODES.get(hardware.kind, hardware.kind)
            selector.setdefault("cloud.google.com/gke-tpu-accelerator", node)
        if tpu and hardware.topology is not None:
            selector.setdefault("cloud.google.com/gke-tpu-topology", hardware.topology)
        if tpu and group.disk is Disk.CHECKPOINTS:
            beside = {
                "labelSelector": {"matchLabels": {**labels, GROUP_LABEL: TRUNK_GROUP}},
                "topologyKey": _NODE_POOL,
            }
            required = {"requiredDuringSchedulingIgnoredDuringExecution": [beside]}
            made["affinity"] = {"podAffinity": required}
    if selector:
        made["nodeSelector"] = selector


def _is_tpu(hardware: Hardware | None) -> bool:
    return hardware is not None and hardware.kind.startswith("tpu")
