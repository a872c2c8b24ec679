"""Asks for leases beside the sampling, and has their versions on this machine before it tells."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from runspec.core.errors import UserError
from runspec.core.spec.schema import SamplerPool
from sampler.worker.held import Failed, Granted, Happening, NoLease
from sampler.worker.rollouts import PlannedRollout
from sampler.worker.versions import Versions
from verify.client import CoordinatorClient
from verify.formats.lease import Lease, lease_digest, open_lease

LEASE_POLL_S = 1.0
"""How long one question for a lease stays open."""


class Asker:
    """One thread that asks once for each `ask`.

    Args:
        client: the coordinator's.
        versions: where the leases' versions come from.
        pool: that the worker serves.
        plan: makes the requests of a lease.
        tell: gets the answer, on that thread.
    """

    def __init__(
        self,
        client: CoordinatorClient,
        versions: Versions,
        pool: SamplerPool,
        *,
        plan: Callable[[Lease], Sequence[PlannedRollout]],
        tell: Callable[[Happening], None],
    ) -> None:
        self._client, self._versions, self._pool = client, versions, pool
        self._plan, self._tell = plan, tell
        self._questions: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name="ask", daemon=True).start()

    def ask(self) -> None:
        """Asks; `tell` gets `Granted`, `NoLease` or `Failed`."""
        self._questions.put(None)

    def _work(self) -> None:
        while True:
            self._questions.get()
            try:
                self._tell(self._answer())
            except BaseException as error:  # noqa: BLE001 - raised again by the loop
                self._tell(Failed(error))
                return

    def _answer(self) -> Happening:
        data = self._client.lease(LEASE_POLL_S)
        if data is None:
            return NoLease()
        lease = open_lease(data, coordinators=self._client.roles().coordinator)
        if lease.pool != self._pool.name or lease.groups > self._pool.groups_per_submission:
            raise UserError(
                f"a lease of {lease.groups} groups for pool {lease.pool!r}",
                place="coordinator",
                remedy=f"this worker serves {self._pool.name!r}: check --pool and --key",
            )
        self._versions.get(lease.version, lease.manifest_digest)
        return Granted(lease, lease_digest(data), self._plan(lease))
