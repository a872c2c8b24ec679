"""The coordinator's defence against floods of requests, keys, submissions and connections.

`Edge` is all that the coordinator's core uses. Its parts raise `Refusal` (429 with `Retry-After`,
403 or 503), and the core neither counts nor times clients. `docs/public-runs.md` lists the limits.
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
    """Limits between clients and the coordinator's core."""

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
            journal: the run's.
            spec: the run's resolved spec.
            roles: the run's.
            waiting: returns the submissions that wait for a verdict.
        """
        limiter, proxies = Limiter(), networks(spec.verify.proxies)
        checker = RequestChecker(spec.name)
        return cls(
            Authentication(journal, checker, limiter, roles, proxies),
            NewKeys(limiter),
            Backlog(journal, waiting, spec.verify.backlog),
        )
