"""Fetches the versions that are due as they appear, while an earlier one is evaluated."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from broadcast.client import WeightsClient
from runspec.core.errors import UserError
from runspec.core.latest import Latest
from sampler.role import VersionWatch


@dataclass(frozen=True)
class Arrived:
    """A version on this machine."""

    version: int
    path: Path


class Arrivals(VersionWatch):
    """The newest due version that nobody has taken; one at most waits.

    `newest` is the newest version that was announced, once what is due up to it was fetched.

    Args:
        client: makes a client of relays and origins.
        due: returns the versions in (after, newest] that are due, in order.
        fetch_s: seconds after which a fetch is given up.
        log: told of what is skipped, and of errors.
    """

    def __init__(
        self,
        client: Callable[[], WeightsClient],
        due: Callable[[int, int], Sequence[int]],
        *,
        fetch_s: float,
        log: logging.Logger,
    ) -> None:
        super().__init__(client, log)
        self._due, self._fetch_s = due, fetch_s
        self._changed = threading.Condition()
        self._waiting: Arrived | None = None
        self._taken = -1
        self._thread.start()

    def take(self, wait_s: float) -> Arrived | None:
        """Return the newest due version, or None if there is none within `wait_s` seconds.

        The one taken before is removed from this machine.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None, wait_s)
            taken, self._waiting = self._waiting, None
            if taken is not None:
                self._taken = taken.version
        return taken

    def _take_in(self, latest: Latest) -> None:
        if found := self._due(self.newest, latest.version):
            self._bring(found, latest.version, latest.manifest_digest)
        self.newest = latest.version  # not before: it may be the run's last

    def _bring(self, versions: Sequence[int], newest: int, digest: str) -> None:
        """Fetch the last of some due versions; the publisher's signature is on each."""
        *others, version = versions
        expected = digest if version == newest else None
        try:
            path = self._client.fetch(version, manifest_digest=expected, deadline_s=self._fetch_s)
        except UserError as error:
            self._log.warning("version %d is not evaluated, nobody serves it: %s", version, error)
            return
        with self._changed:
            before, self._waiting = self._waiting, Arrived(version, path)
            self._changed.notify_all()
            self._client.prune({version, self._taken})
        for skipped in [*([before.version] if before else []), *others]:
            self._log.warning(
                "version %d is not evaluated: the evaluator was busy until version %d was there",
                *(skipped, version),
            )
