"""A run that is on a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from runspec.backends.kubernetes.cluster import Cluster
from runspec.backends.kubernetes.naming import cluster_of, label
from runspec.backends.kubernetes.pods import BESIDE, ROLE, RUNS
from runspec.backends.kubernetes.render import env_secret
from runspec.core.errors import UserError
from runspec.core.spec.role_names import trunk_names
from runspec.core.spec.schema import RunSpec
from runspec.local.bundle import TRUNK_GROUP
from runspec.local.site import groups_of

_INDEX = "batch.kubernetes.io/job-completion-index"


class RemoteRun:
    """A run on a cluster.

    Args:
        spec: of its site.

    Raises:
        UserError: the spec describes no cluster.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.spec, self._run, self._jobset = spec, spec.name, label(spec.name)
        self._cluster = Cluster(cluster_of(spec).namespace)

    def apply(self, objects: Iterable[Mapping[str, Any]]) -> None:
        """Starts the run, changes its objects, or goes on with it after a pause or a failure.

        Raises:
            UserError: a secret of the spec has no value here, or the cluster refuses.
        """
        secret = env_secret(self.spec, os.environ)
        found = self._cluster.jobset(self._jobset)
        if found is not None and _ended(found):
            self._cluster.delete_jobset(self._jobset)
        self._cluster.apply([*([] if secret is None else [secret]), *objects])
        if found is not None and found["spec"].get("suspend"):
            self._cluster.suspend(self._jobset, False)

    def state(self) -> str:
        """Return the cluster's state of the run, in a line.

        Raises:
            UserError: the cluster has no such run.
        """
        found = self._cluster.jobset(self._jobset)
        if found is None:
            raise UserError(
                "the cluster has no such run",
                place=f"{self._cluster.namespace}/{self._jobset}",
                remedy="start it with `runspec apply`",
            )
        if found["spec"].get("suspend"):
            return "paused: its pods are ended, its volumes stay"
        for condition in _ended(found):
            return f"{condition['type']}: {condition.get('message', '')}"
        return "waiting for its trunk's pod"

    def inside(self, arguments: Sequence[str]) -> int:
        """Runs a command of runspec beside the run directory; returns its exit code."""
        command = ["runspec", *arguments, "--runs-dir", RUNS]  # of two the last one counts
        for pod in self._cluster.pods(self._jobset, TRUNK_GROUP):
            if pod["status"]["phase"] == "Running":
                return self._cluster.execute(str(pod["metadata"]["name"]), command)
        print(f"{self._run}: {self.state()}")
        return 0

    def logs(self, role: str, follow: bool, tail: int | None) -> int:
        """Prints the log of the pod of a role that is not the trunk's."""
        for line in self._cluster.logs(*self._container(role), follow, tail):
            print(line)
        return 0

    def pause(self) -> int:
        """Suspends the run: its roles end in order, and its pods give back what they have."""
        self.state()
        self._cluster.suspend(self._jobset, True)
        print(f"{self._run} is paused: {self._cluster.namespace} has its accelerators back soon.")
        return 0

    def resume(self) -> int:
        """Makes the pods of a paused run again."""
        self.state()
        self._cluster.suspend(self._jobset, False)
        print(f"{self._run} goes on from its newest checkpoint.")
        return 0

    def delete(self) -> None:
        """Deletes the run on the cluster, its volumes too."""
        self._cluster.delete(self._jobset)

    def _container(self, role: str) -> tuple[str, str]:
        """The newest pod of a role, and its container there."""
        for group in groups_of(self.spec):
            if role in (*group.members, *group.beside):
                beside = role in group.beside
                index = str(0 if beside else group.members.index(role))
                pods = self._cluster.pods(self._jobset, label(group.name))
                own = [pod for pod in pods if pod["metadata"]["labels"].get(_INDEX) == index]
                if own:
                    newest = max(own, key=lambda pod: str(pod["metadata"]["creationTimestamp"]))
                    return str(newest["metadata"]["name"]), BESIDE if beside else ROLE
        groups = groups_of(self.spec)
        names = [name for group in groups for name in (*group.members, *group.beside)]
        raise UserError(
            f"no pod of role {role!r}",
            place=self._jobset,
            remedy=f"one of: {', '.join([*trunk_names(self.spec), *names])}",
        )


def _ended(jobset: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The conditions that say that a JobSet starts no pod any more."""
    conditions = jobset.get("status", {}).get("conditions", [])
    final = ("Completed", "Failed")
    return [each for each in conditions if each["type"] in final and each["status"] == "True"]
