"""A run on a Kubernetes cluster: one JobSet and what it needs, reached through the cluster's API.

The `kubernetes` client is imported lazily. It finds the cluster as kubectl does: the current
context of the kubeconfig, or the service account of a pod.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from pathlib import Path
from typing import Any

import typer

from runspec.backends.kubernetes.pods import (
    BESIDE,
    GROUP_LABEL,
    ROLE,
    RUN_LABEL,
    RUNS,
    cluster_of,
    label,
)
from runspec.backends.kubernetes.render import SITE, env_secret, render_site
from runspec.core.entry_points import install_command
from runspec.core.errors import UserError
from runspec.core.schema import RunSpec
from runspec.core.schema.load import load_resolved
from runspec.core.schema.role_names import STAGES, trunk_names
from runspec.local.backend import LocalProcesses, Processes
from runspec.local.processes import PreparedRun
from runspec.local.run_dir import note_site, run_directory
from runspec.local.site import TRUNK_GROUP, groups_of

_INDEX = "batch.kubernetes.io/job-completion-index"
_CORE, _JOBSET = "api/v1", "apis/jobset.x-k8s.io/v1alpha2"
PATHS = {
    "JobSet": (_JOBSET, "jobsets"),
    "Service": (_CORE, "services"),
    "Secret": (_CORE, "secrets"),
    "ConfigMap": (_CORE, "configmaps"),
    "PersistentVolumeClaim": (_CORE, "persistentvolumeclaims"),
}
"""Kinds of objects that a run has; they are deleted in this order."""
MANAGER = "runspec"
NOT_FOUND = 404
GONE_S = 180.0
"""Longer than a pod's grace."""
_POLL_S = 0.5


class KubernetesBackend:
    """`placement.backend: kubernetes`."""

    def apply(self, spec: RunSpec, detach: bool, runs_dir: Path | None) -> int:
        """Start or change the run, or go on with it after a pause or a failure.

        It goes on there in any case, so `detach` changes nothing.

        Raises:
            UserError: a secret of the spec has no value here, or the cluster refuses.
        """
        run_dir = run_directory(spec, runs_dir)
        objects = render_site(spec, run_dir)
        run, cluster = label(spec.name), Cluster(cluster_of(spec).namespace)
        secret = env_secret(spec, os.environ)
        found = cluster.jobset(run)
        if found is not None and _ended(found):
            cluster.delete_jobset(run)
        cluster.apply([*([] if secret is None else [secret]), *objects])
        if found is not None and found["spec"].get("suspend"):
            cluster.suspend(run, False)
        site = {"backend": "kubernetes", "run": spec.name, "namespace": cluster.namespace}
        note_site(run_dir, site)
        print(f"{spec.name} is on the cluster. See how far it is: runspec status {run_dir}")
        return 0

    def command(self, site: Mapping[str, str], arguments: Sequence[str]) -> int:
        name, folder = site["run"], Path(site["runs_dir"]) / site["run"] / SITE
        spec = load_resolved(folder)
        run, cluster = label(spec.name), Cluster(cluster_of(spec).namespace)
        match arguments[0]:
            case "pause":
                _state(cluster, run)
                cluster.suspend(run, True)
                print(f"{name} is paused: {cluster.namespace} has its accelerators back soon.")
                return 0
            case "resume":
                _state(cluster, run)
                cluster.suspend(run, False)
                print(f"{name} goes on from its newest checkpoint.")
                return 0
            case "delete":
                if not {"--yes", "-y"} & set(arguments):
                    question = f"Delete {name} on its cluster with everything in it?"
                    typer.confirm(question, abort=True)
                cluster.delete(run)
                shutil.rmtree(folder)
                print(f"Deleted {name} on its cluster")
                return 0
            case "logs":
                parser = argparse.ArgumentParser(exit_on_error=False)
                parser.add_argument("--role")
                parser.add_argument("-f", "--follow", action="store_true")
                parser.add_argument("--tail", type=int)
                asked, _ = parser.parse_known_args(list(arguments))
                if asked.role not in (None, *trunk_names(spec), *STAGES):
                    where = _container(cluster, spec, asked.role)
                    for line in cluster.logs(*where, asked.follow, asked.tail):
                        print(line)
                    return 0
        # The run directory is in the trunk's pod; of two --runs-dir the last one counts.
        command = ["runspec", *arguments, "--runs-dir", RUNS]
        for pod in cluster.pods(run, TRUNK_GROUP):
            if pod["status"]["phase"] == "Running":
                return cluster.execute(str(pod["metadata"]["name"]), command)
        print(f"{name}: {_state(cluster, run)}")
        return 0

    def processes(self, run: PreparedRun) -> tuple[Processes, PreparedRun]:
        """The trunk's pod is one machine."""
        return LocalProcesses(run.directory / "logs"), run


def _state(cluster: Cluster, run: str) -> str:
    """Return the cluster's state of a run, in a line.

    Raises:
        UserError: the cluster has no such run.
    """
    found = cluster.jobset(run)
    if found is None:
        raise UserError(
            "the cluster has no such run",
            place=f"{cluster.namespace}/{run}",
            remedy="start it with `runspec apply`",
        )
    if found["spec"].get("suspend"):
        return "paused: its pods are ended, its volumes stay"
    for condition in _ended(found):
        return f"{condition['type']}: {condition.get('message', '')}"
    return "waiting for its trunk's pod"


def _container(cluster: Cluster, spec: RunSpec, role: str) -> tuple[str, str]:
    """Return the newest pod of a role that is not the trunk's, and its container there.

    Raises:
        UserError: there is none.
    """
    run, groups = label(spec.name), groups_of(spec)
    for group in groups:
        if role in (*group.members, *group.beside):
            beside = role in group.beside
            index = str(0 if beside else group.members.index(role))
            pods = cluster.pods(run, label(group.name))
            own = [pod for pod in pods if pod["metadata"]["labels"].get(_INDEX) == index]
            if own:
                newest = max(own, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
                return str(newest["metadata"]["name"]), BESIDE if beside else ROLE
    names = [name for group in groups for name in (*group.members, *group.beside)]
    raise UserError(
        f"no pod of role {role!r}",
        place=run,
        remedy=f"one of: {', '.join([*trunk_names(spec), *names])}",
    )


def _ended(jobset: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conditions that say that a JobSet starts no pod any more."""
    conditions = jobset.get("status", {}).get("conditions", [])
    final = ("Completed", "Failed")
    return [each for each in conditions if each["type"] in final and each["status"] == "True"]


class Cluster:
    """One namespace of a cluster.

    Args:
        namespace: of the run.
    """

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace

    def apply(self, objects: Iterable[Mapping[str, Any]]) -> None:
        """Makes objects, or changes them to what is given (server-side apply).

        Raises:
            UserError: the cluster refuses one.
        """
        query = [("fieldManager", MANAGER), ("force", "true")]
        for made in objects:
            path = self._path(made["kind"], made["metadata"]["name"])
            self._ask("PATCH", path, query, "application/apply-patch+yaml", made)

    def jobset(self, run: str) -> dict[str, Any] | None:
        """The JobSet of a run; None where there is none."""
        return self._ask("GET", self._path("JobSet", run), missing_is_none=True)

    def suspend(self, run: str, suspended: bool) -> None:
        """Ends the run's pods, or makes them again; its volumes stay."""
        change = {"spec": {"suspend": suspended}}
        path = self._path("JobSet", run)
        self._ask("PATCH", path, [], "application/merge-patch+json", change)

    def delete_jobset(self, run: str) -> None:
        """Deletes the JobSet with its pods, and waits until it is gone.

        Raises:
            UserError: it takes longer than pods may take to end.
        """
        query = [("propagationPolicy", "Foreground")]
        self._ask("DELETE", self._path("JobSet", run), query, missing_is_none=True)
        deadline = time.monotonic() + GONE_S
        while self.jobset(run) is not None:
            if time.monotonic() >= deadline:
                raise UserError(
                    f"the pods of the last attempt are still there after {GONE_S:.0f} s",
                    place=f"{self.namespace}/{run}",
                    remedy="see `kubectl get pods`, and apply again",
                )
            time.sleep(_POLL_S)

    def delete(self, run: str) -> None:
        """Deletes everything that the run has on the cluster."""
        for kind in PATHS:
            query = [("labelSelector", f"{RUN_LABEL}={run}"), ("propagationPolicy", "Foreground")]
            self._ask("DELETE", self._path(kind), query)

    def pods(self, run: str, group: str | None = None) -> list[dict[str, Any]]:
        """The run's pods, or those of a role group, by name."""
        selector = f"{RUN_LABEL}={run}" + ("" if group is None else f",{GROUP_LABEL}={group}")
        path = f"/{_CORE}/namespaces/{self.namespace}/pods"
        found = self._ask("GET", path, [("labelSelector", selector)]) or {"items": []}
        return sorted(found["items"], key=lambda pod: str(pod["metadata"]["name"]))

    def logs(self, pod: str, container: str, follow: bool, tail: int | None) -> Iterator[str]:
        """The lines of a container's log, which end with its pod if they are followed."""
        from kubernetes.client import ApiException, CoreV1Api

        options: dict[str, Any] = {"container": container}
        options |= {} if tail is None else {"tail_lines": tail}
        try:
            response = CoreV1Api(self._api).read_namespaced_pod_log(
                pod, self.namespace, follow=follow, _preload_content=False, **options
            )
        except ApiException as error:
            raise _refused(error, pod) from error
        with closing(response):
            for line in response:
                yield line.decode(errors="replace").rstrip("\n")

    def execute(self, pod: str, command: Sequence[str]) -> int:
        """Runs a command in a pod, prints what it prints, and returns its exit code.

        Raises:
            UserError: the cluster refuses.
        """
        from kubernetes.client import ApiException, CoreV1Api
        from kubernetes.stream import stream

        try:
            session = stream(
                CoreV1Api(self._api).connect_get_namespaced_pod_exec,
                *(pod, self.namespace),
                command=list(command),
                stdout=True,
                stderr=True,
                stdin=False,
                tty=False,
                _preload_content=False,
            )
        except ApiException as error:
            raise _refused(error, pod) from error
        with closing(session):
            while session.is_open():
                session.update(timeout=1)
                for ready, read, out in (
                    (session.peek_stdout, session.read_stdout, sys.stdout),
                    (session.peek_stderr, session.read_stderr, sys.stderr),
                ):
                    if ready():
                        print(read(), end="", file=out, flush=True)
            return int(session.returncode)

    @cached_property
    def _api(self) -> Any:
        try:
            from kubernetes import client, config
        except ImportError as error:
            raise UserError(
                "the kubernetes client is not installed",
                place="placement.backend",
                remedy=install_command("kubernetes"),
            ) from error
        try:
            file = os.environ.get("KUBECONFIG")
            if file is None and "KUBERNETES_SERVICE_HOST" in os.environ:
                config.load_incluster_config()
            else:
                config.load_kube_config(file)
        except (config.ConfigException, OSError) as error:
            raise UserError(
                f"no cluster is configured: {error}",
                place="kubeconfig",
                remedy="make `kubectl get pods` work, or set KUBECONFIG",
            ) from error
        return client.ApiClient()

    def _path(self, kind: str, name: str | None = None) -> str:
        group, plural = PATHS[kind]
        path = f"/{group}/namespaces/{self.namespace}/{plural}"
        return path if name is None else f"{path}/{name}"

    def _ask(
        self,
        method: str,
        path: str,
        query: Sequence[tuple[str, str]] = (),
        content: str = "application/json",
        body: Mapping[str, Any] | None = None,
        missing_is_none: bool = False,
    ) -> dict[str, Any] | None:
        from urllib3.exceptions import HTTPError

        api = self._api
        call = api.param_serialize(
            method,
            path,
            query_params=list(query),
            header_params={"Accept": "application/json", "Content-Type": content},
            body=body,
            auth_settings=["BearerToken"],
        )
        try:
            response = api.call_api(*call)
        except HTTPError as error:
            raise UserError(
                f"the cluster does not answer: {error}",
                place=str(api.configuration.host),
                remedy="make `kubectl get pods` work from here",
            ) from error
        answer: dict[str, Any] = json.loads(response.read() or b"{}")
        if response.status == NOT_FOUND and missing_is_none:
            return None
        if response.status >= 300:
            raise UserError(
                f"the cluster refuses: {answer.get('message', response.status)}",
                place=f"{method} {path}",
                remedy="see `kubectl auth can-i --list`, and whether JobSet is installed",
            )
        return answer


def _refused(error: Any, pod: str) -> UserError:
    return UserError(
        f"the cluster refuses: {error.reason}", place=pod, remedy="see `kubectl describe pod`"
    )
