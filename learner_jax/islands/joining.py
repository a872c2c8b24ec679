"""Outer states: what an island stores of its own for those that join, and what it starts from.

An island goes on from a full state if that fits the coordinator's records and the shares since then
are left. Otherwise it joins anew, from the newest outer state of another island.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from broadcast.store import AlreadyPublished
from learner_jax.islands.connection import ATTEMPT_S, REJOIN, REPORT_EVERY_S, Connection
from learner_jax.islands.outer import OuterState
from learner_jax.islands.share_fetcher import BadObject
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from verify.formats.islands import StoredOuter
from verify.island_client import Committed

KEPT_PERIODS = 2
"""Periods of `checkpoints.every` steps before the newest outer state whose shares stay in a store,
for islands that start again at an older full state."""


class Stopped(Exception):
    """This process was told to end while it waited for the others."""


class Behind(UserError):
    """The others have removed shares that this island needs: it must join anew."""


@dataclass
class Joining:
    """Outer states of one island and of the others."""

    connection: Connection
    every: int
    """Steps between two outer states that every island stores."""
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
                self.connection.store.put_outer(version, outer.theta, outer.momentum)
        except AlreadyPublished as there:
            raise UserError(
                f"the outer state of version {version} was published with other contents",
                place=there.place,
                remedy=REJOIN,
            ) from there
        self._announced = version
        self.connection.store.keep(self._kept_since(version))
        self.connection.client.announce(self.connection.url, version, outer.digest)

    def can_follow(self, version: int) -> bool:
        """Return whether all shares are left that the records since a version name.

        Shares of others are removed in time; this island's own may be lost with its disk.
        """
        step = version
        while (record := self.connection.record(step)) is not None:
            own = [each for each in record.contributors if each.island == self.connection.island]
            data = self.connection.store.share(step) if own else None
            if own and (data is None or digest_bytes(data) != own[0].share):
                return False
            step += 1
        return step == version or not self.removed(version)

    def fetch(self) -> tuple[int, OuterState]:
        """Return the newest outer state that another island has stored, and its version.

        Raises:
            Stopped: this process was told to end before there was one.
            BadObject: it is not the one that was announced.
        """
        begun, report_at = time.monotonic(), REPORT_EVERY_S
        while True:
            states = self.connection.client.outer_states()
            # An island that has not noticed a rollback may still announce another version.
            left = range(states.oldest, states.committed + 1)
            found = [each for each in states.stored if each.version in left]
            for each in sorted(found, key=lambda each: -each.version):
                if each.island == self.connection.island or not self.can_follow(each.version):
                    continue
                if (outer := self._try_outer(each)) is not None:
                    return each.version, outer
            if self.connection.stop.wait(1.0):
                raise Stopped
            waited = time.monotonic() - begun
            if waited >= report_at:
                self.connection.log.info(
                    "%.0f s waiting for an island that has the outer state", waited
                )
                report_at = waited + REPORT_EVERY_S

    def _try_outer(self, stored: StoredOuter) -> OuterState | None:
        """Return an outer state; None if its server does not give it soon."""
        try:
            theta, momentum = self.connection.fetcher.fetch_outer(
                *(stored.island, stored.url, stored.version),
                digest=stored.digest,
                size=self.connection.size,
                deadline_s=ATTEMPT_S,
            )
        except BadObject:
            raise
        except UserError as error:
            self.connection.log.warning("trying another island: %s", error)
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
        states = self.connection.client.outer_states()
        if version > states.committed:
            return f"only {states.committed} steps are committed"
        recorded = self.connection.client.result_of(version - 1) if version else None
        if recorded is not None and recorded != outer.digest:
            return f"the others have another outer state of version {version}"
        if version < states.oldest:
            return f"records before step {states.oldest} are not served any more"
        if offered and version == states.committed:
            answer = self.connection.client.record(version, 0.0)
            if not isinstance(answer, Committed) and self.connection.island not in answer.offered:
                return f"the coordinator has no share of step {version} that it would count"
        return ""

    def forget(self, version: int) -> None:
        """Remove what this island stored of a history that is not the run's.

        Shares of committed steps before it stay: the others may need them.

        Args:
            version: of the full state that does not fit.
        """
        self.connection.store.remove_from(
            min(version, self.connection.client.outer_states().committed)
        )

    def _kept_since(self, version: int) -> int:
        """The version since which an island that stores an outer state keeps everything."""
        return max(0, version // self.every - KEPT_PERIODS) * self.every

    def removed(self, step: int) -> bool:
        """Return whether another island has removed its share of a step."""
        others = (
            each
            for each in self.connection.client.outer_states().stored
            if each.island != self.connection.island
        )
        return any(step < self._kept_since(each.version) for each in others)
