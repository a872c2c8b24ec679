"""The coordinator's defence against floods of requests, keys, submissions and connections.

The services use `Edge` only. Its parts raise `Refusal` (429 with `Retry-After`, 403 or 503), so the
services neither count nor time clients. `docs/public-runs.md` lists the limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runspec.core.roles import Roles
from runspec.core.spec.schema import RunSpec
from verify.coordinator.edge.authentication import Authentication, networks
from verify.coordinator.edge.backlog import Backlog
from verify.coordinator.edge.limits import Limiter, NewKeys
from verify.coordinator.journal import Journal
from verify.coordinator.machine.state import LeaseRecord
from verify.request_auth import RequestChecker


@dataclass(frozen=True)
class Edge:
    """Authentication and limits between clients and the coordinator's services."""

    authentication: Authentication
    new_keys: NewKeys
    backlog: Backlog

    @classmethod
    def of(
        cls,
        journal: Journal,
        spec: RunSpec,
        roles: Roles,
        waiting: Callable[[], Sequence[LeaseRecord]],
    ) -> Edge:
        """Make the edge of a run.

        Args:
            journal: journal of the run.
            spec: the run's resolved spec.
            roles: roles of the run.
            waiting: returns the submissions that wait for a verdict.
        """
        limiter, proxies = Limiter(), networks(spec.verify.proxies)
        checker = RequestChecker(spec.name)
        return cls(
            Authentication(journal, checker, limiter, roles, proxies),
            NewKeys(limiter),
            Backlog(journal, waiting, spec.verify.backlog),
        )
