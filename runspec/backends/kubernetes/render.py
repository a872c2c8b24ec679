"""The objects of a run on a Kubernetes cluster, as plain data: pure, from spec and bundles.

One JobSet has a replicated job for each role group. The trunk is one pod with the run directory on
a volume of its own; it finishes the JobSet. A pod finds its bundle by its index in its job.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from runspec.backends.kubernetes.pods import (
    GROUP_LABEL,
    RUN_LABEL,
    addressed,
    cluster_of,
    in_object_store,
    label,
    pod,
    pod_host,
    server_ports,
)
from runspec.core.errors import UserError
from runspec.core.process import EXIT_FINAL
from runspec.core.schema import RunSpec
from runspec.core.schema.load import FILE_NAME as SPEC_FILE
from runspec.core.schema.load import dump_resolved
from runspec.core.schema.role_names import elsewhere
from runspec.local.site import (
    ROLES_FILE,
    TRUNK_GROUP,
    Bundle,
    Disk,
    Group,
    groups_started,
    make_site,
)

Manifest = dict[str, Any]
SITE = "site"
"""Folder of the keys, below the place of the run directory on the machine that applies."""
FOREVER = 2**31 - 1
"""`backoffLimit` of a pod that is started again however often it ends; Kubernetes waits longer each
time, five minutes at most."""
MAX_SECRET = 2**20
"""Bytes that a Secret may hold."""


def render_site(spec: RunSpec, run_dir: Path) -> list[Manifest]:
    """Prepares the site of a run for the cluster that its spec describes; returns the objects.

    Args:
        spec: of the run.
        run_dir: where a run of this machine would lie; the keys are kept below it.

    Raises:
        UserError: the spec cannot run there.
    """
    resolved, bundles = make_site(addressed(spec), run_dir / SITE)
    return list(manifests(resolved, bundles))


def manifests(spec: RunSpec, bundles: Sequence[Bundle]) -> Iterator[Manifest]:
    """Everything that the run needs on its cluster, in the order of creation.

    Args:
        spec: the site's: `addressed`, then `site_spec`.
        bundles: of the site.

    Raises:
        UserError: the cluster could not hold it.
    """
    run, cluster, away = label(spec.name), cluster_of(spec), elsewhere(spec)
    groups = groups_started(spec)

    def made(kind: str, name: str, api: str = "v1", **content: object) -> Manifest:
        return {"apiVersion": api, "kind": kind, "metadata": _metadata(spec, name), **content}

    def claim(name: str, mode: str, storage_class: str | None) -> Manifest:
        wanted: Manifest = {
            "accessModes": [mode],
            "resources": {"requests": {"storage": cluster.storage}},
        }
        if storage_class is not None:
            wanted["storageClassName"] = storage_class
        return made("PersistentVolumeClaim", f"{run}-{name}", spec=wanted)

    held = {bundle.group: bundle for bundle in bundles}
    roles = held[TRUNK_GROUP].roles_document.decode()
    shared = {SPEC_FILE: dump_resolved(spec).decode(), ROLES_FILE: roles}
    yield made("ConfigMap", f"{run}-spec", data=shared)
    yield claim("run", "ReadWriteOnce", cluster.storage_class)
    if any(group.disk is Disk.CHECKPOINTS for group in groups) and not in_object_store(spec):
        yield claim("checkpoints", "ReadWriteMany", cluster.shared_storage_class)
    for group in groups:
        name = label(group.name)
        yield made("Secret", f"{run}-{name}", type="Opaque", data=_secret(group, held))
    for server, port in server_ports(spec).items():
        if server not in away:
            own = (each.name for each in groups if server in (each.name, *each.beside))
            on = next(own, TRUNK_GROUP)
            selector = {RUN_LABEL: run, GROUP_LABEL: label(on)}
            ports = [{"name": "http", "port": port, "targetPort": port, "protocol": "TCP"}]
            service = {"selector": selector, "ports": ports}
            yield made("Service", f"{run}-{label(server)}", spec=service)
    api = "jobset.x-k8s.io/v1alpha2"
    jobset = made("JobSet", run, api, spec=_jobset(spec, run, groups))
    if cluster.queue is not None:
        jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = cluster.queue
    yield jobset


def env_secret(spec: RunSpec, env: Mapping[str, str]) -> Manifest | None:
    """The Secret with the values of the spec's secrets; None where it has none.

    Raises:
        UserError: a value is not in `env`.
    """
    data = {}
    for secret in spec.secrets:
        name = secret.source.env
        if name not in env:
            raise UserError(
                f"the environment has no {name}",
                place=f"secrets.{secret.name}",
                remedy=f"export {name}, and apply again",
            )
        data[name] = b64encode(env[name].encode()).decode()
    metadata = _metadata(spec, f"{label(spec.name)}-env")
    made = {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque"}
    return {**made, "data": data} if data else None


def _metadata(spec: RunSpec, name: str) -> Manifest:
    labels = {RUN_LABEL: label(spec.name)}
    return {"name": name, "namespace": cluster_of(spec).namespace, "labels": labels}


def _secret(group: Group, held: Mapping[str, Bundle]) -> dict[str, str]:
    own = [held[member].encode(shared=True) for member in group.members]
    data = {f"{i}.json": b64encode(each).decode() for i, each in enumerate(own)}
    if sum(map(len, own)) > MAX_SECRET:
        raise UserError(
            f"the bundles of {len(group.members)} processes exceed the {MAX_SECRET} bytes that a "
            "Secret holds",
            place=group.name,
            remedy="divide the group into several pools, or start its roles by hand",
        )
    return data


def _jobset(spec: RunSpec, run: str, groups: Sequence[Group]) -> Manifest:
    rule = {
        "name": "run-cannot-go-on",
        "action": "FailJobSet",
        "onJobFailureReasons": ["PodFailurePolicy"],
        "targetReplicatedJobs": [TRUNK_GROUP],
    }
    return {
        "network": {
            "enableDNSHostnames": True,
            "subdomain": run,
            "publishNotReadyAddresses": True,
        },
        "successPolicy": {"operator": "All", "targetReplicatedJobs": [TRUNK_GROUP]},
        "failurePolicy": {"maxRestarts": spec.placement.restarts, "rules": [rule]},
        "replicatedJobs": [_replicated(spec, run, group) for group in groups],
    }


def _replicated(spec: RunSpec, run: str, group: Group) -> Manifest:
    """A role group: one Job, of which each pod knows its index."""
    name, count = label(group.name), len(group.members)
    pod_host(run, name, count - 1)
    labels = {RUN_LABEL: run, GROUP_LABEL: name}
    job: Manifest = {
        "completionMode": "Indexed",
        "completions": count,
        "parallelism": count,
        "backoffLimit": FOREVER,
        "template": {"metadata": {"labels": labels}, "spec": pod(spec, run, group, labels)},
    }
    made: Manifest = {"name": name, "replicas": 1, "template": {"spec": job}}
    if group.name == TRUNK_GROUP:
        job["backoffLimit"] = spec.placement.restarts
        job["podFailurePolicy"] = _trunk_failures()
    elif TRUNK_GROUP in group.waits_for:
        made["dependsOn"] = [{"name": TRUNK_GROUP, "status": "Ready"}]
    return made


def _trunk_failures() -> Manifest:
    """A lost node is no failure of the run; an exit that nothing but a person mends ends it."""
    lost = {"type": "DisruptionTarget", "status": "True"}
    final = {"containerName": "role", "operator": "In", "values": [EXIT_FINAL]}
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [lost]},
            {"action": "FailJob", "onExitCodes": final},
        ]
    }
