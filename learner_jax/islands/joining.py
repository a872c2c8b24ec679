"""Outer states: what an island stores of its own for those that join, and what it starts from.

An island goes on from a full state if that fits the coordinator's records and the shares since then
are left. Otherwise it joins anew, from the newest outer state of another island.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass

import numpy as np

from broadcast.store import AlreadyPublished
from learner_jax.islands.shares import BadObject, ShareFetcher, ShareStore
from learner_jax.islands.state import OuterState
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.schema import Islands
from verify.formats.islands import CommitRecord, StoredOuter
from verify.island_client import Committed, IslandClient

ATTEMPT_S = 60.0
"""Seconds of one try to fetch; the next one asks where the islands are now."""
REPORT_EVERY_S = 30.0
KEPT_PERIODS = 2
"""Periods of `checkpoints.every` steps before the newest outer state whose shares stay in a store,
for islands that start again at an older full state."""
REJOIN = "remove this island's folder and its store, so that it joins anew"


class Stopped(Exception):
    """This process was told to end while it waited for the others."""


class Behind(UserError):
    """The others have removed shares that this island needs: it must join anew."""


@dataclass
class Joining:
    """Outer states of one island and of the others, in process 0 of its learner."""

    run: str
    island: str
    url: str
    """Where the others find this island's store."""
    size: int
    """n: elements of a share, of theta, and of the momentum."""
    islands: Islands
    """Of the spec: codec, `min_cosine`, `silence`, outer optimizer."""
    every: int
    """Steps between two outer states that every island stores."""
    corpus: str
    """Digest of the documents; empty for a run that trains on rollouts."""
    client: IslandClient
    store: ShareStore
    fetcher: ShareFetcher
    stop: threading.Event
    """Set when this process is told to end."""
    log: logging.Logger
    _outer: tuple[int, OuterState] | None = None
    """The newest outer state, with its version."""
    _announced: int = -1
    """Version of the last outer state that was stored."""

    def hold(self, version: int, outer: OuterState, *, store: bool) -> None:
        """Take the newest outer state, and store it now or when a wait is long.

        Raises:
            UserError: the store cannot be written.
        """
        self._outer = version, outer
        if store:
            self.publish()

    def publish(self) -> None:
        """Store the newest outer state for islands that join; remove what nobody needs any more.

        Raises:
            UserError: the store cannot be written.
        """
        assert self._outer is not None, "`hold` was called"
        version, outer = self._outer
        try:
            if version != self._announced:
                self.store.put_outer(version, outer.theta, outer.momentum)
        except AlreadyPublished as there:
            raise UserError(
                f"the outer state of version {version} was published with other contents",
                place=there.place,
                remedy=REJOIN,
            ) from there
        self._announced = version
        self.store.keep(self._kept_since(version))
        self.client.announce(self.url, version, outer.digest)

    def can_follow(self, version: int) -> bool:
        """Return whether all shares are left that the records since a version name.

        Shares of others are removed in time; this island's own may be lost with its disk.
        """
        step = version
        while (record := self._record(step)) is not None:
            own = [each for each in record.contributors if each.island == self.island]
            data = self.store.share(step) if own else None
            if own and (data is None or digest_bytes(data) != own[0].share):
                return False
            step += 1
        return step == version or not self._removed(version)

    def fetch_outer(self) -> tuple[int, OuterState]:
        """Return the newest outer state that another island has stored, and its version.

        Raises:
            Stopped: this process was told to end before there was one.
            BadObject: it is not the one that was announced.
        """
        begun, report_at = time.monotonic(), REPORT_EVERY_S
        while True:
            states = self.client.outer_states()
            # An island that has not noticed a rollback may still announce another version.
            left = range(states.oldest, states.committed + 1)
            found = [each for each in states.stored if each.version in left]
            for each in sorted(found, key=lambda each: -each.version):
                if each.island == self.island or not self.can_follow(each.version):
                    continue
                if (outer := self._try_outer(each)) is not None:
                    return each.version, outer
            if self.stop.wait(1.0):
                raise Stopped
            waited = time.monotonic() - begun
            if waited >= report_at:
                self.log.info("%.0f s waiting for an island that has the outer state", waited)
                report_at = waited + REPORT_EVERY_S

    def _try_outer(self, stored: StoredOuter) -> OuterState | None:
        """Return an outer state; None if its server does not give it soon."""
        try:
            theta, momentum = self.fetcher.fetch_outer(stored, self.size, ATTEMPT_S)
        except BadObject:
            raise
        except UserError as error:
            self.log.warning("trying another island: %s", error)
            return None
        return OuterState(np.array(theta), np.array(momentum))

    def misfit(self, version: int, outer: OuterState, *, offered: bool) -> str:
        """Return why a full state does not fit what the coordinator has; empty if it does.

        It does not after a rollback, or where one of the two was restored from a copy.

        Args:
            version: of the outer state.
            outer: that state.
            offered: whether the full state says that the share of step `version` was offered.
        """
        states = self.client.outer_states()
        if version > states.committed:
            return f"only {states.committed} steps are committed"
        recorded = self.client.result_of(version - 1) if version else None
        if recorded is not None and recorded != outer.digest:
            return f"the others have another outer state of version {version}"
        if version < states.oldest:
            return f"records before step {states.oldest} are not served any more"
        if offered and version == states.committed:
            answer = self.client.record(version, 0.0)
            if not isinstance(answer, Committed) and self.island not in answer.offered:
                return f"the coordinator has no share of step {version} that it would count"
        return ""

    def forget(self, version: int) -> None:
        """Remove what this island stored of a history that is not the run's.

        Shares of committed steps before it stay: the others may need them.

        Args:
            version: of the full state that does not fit.
        """
        self.store.remove_from(min(version, self.client.outer_states().committed))

    def _kept_since(self, version: int) -> int:
        """The version since which an island that stores an outer state keeps everything."""
        return max(0, version // self.every - KEPT_PERIODS) * self.every

    def _removed(self, step: int) -> bool:
        """Return whether another island has removed its share of a step."""
        stored = self.client.outer_states().stored
        return any(step < self._kept_since(e.version) for e in stored if e.island != self.island)

    def _record(self, step: int) -> CommitRecord | None:
        answer = self.client.record(step, 0.0)
        return answer.record if isinstance(answer, Committed) else None
