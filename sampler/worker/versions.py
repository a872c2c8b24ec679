"""Policy versions on this machine: the newest is fetched while the current one samples."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path

from broadcast.client import WeightsClient
from runspec.core.errors import UserError
from runspec.core.latest import Latest
from sampler.role import VersionWatch

FIRST_S = 600.0
"""Seconds until the first version must appear; a learner may have to compile and save it."""


class Versions(VersionWatch):
    """Fetches versions from relays into `cache_dir/v<N>`.

    Args:
        urls: of relays or origins.
        run, root_public_key: whose versions are accepted.
        cache_dir: stores them; only the versions passed to `keep` and the newest stay.
        fetch_s: seconds after which a fetch is given up.
        log: receives errors of the prefetch.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        run: str,
        root_public_key: str,
        cache_dir: Path,
        fetch_s: float,
        log: logging.Logger,
    ) -> None:
        def client() -> WeightsClient:
            return WeightsClient(
                urls, run=run, root_public_key=root_public_key, cache_dir=cache_dir
            )

        super().__init__(client, log)
        self._fetching = threading.Lock()
        self._fetch_s = fetch_s
        self._here: dict[tuple[int, str], Path] = {}

    def first(self) -> tuple[int, Path]:
        """Wait for the newest version, fetch it, and start to prefetch later ones.

        Raises:
            UserError: none appeared by the deadline; the message names the relays.
        """
        latest = self._news.latest(None, FIRST_S)
        if latest is None:
            raise UserError(
                f"no version published within {FIRST_S:.0f} s",
                place="weights",
                remedy="check the learner and the publisher",
            )
        path = self.get(latest.version, latest.manifest_digest)
        self._thread.start()
        return latest.version, path

    def get(self, version: int, manifest_digest: str | None) -> Path:
        """Return the directory of a version, at once if it is on this machine.

        Args:
            version: its number.
            manifest_digest: from a lease; None for a version that the publisher announced.

        Raises:
            UserError: it did not arrive in time, or its digest differs.
        """
        for (number, digest), here in list(self._here.items()):
            if number == version and manifest_digest in (digest, None):
                return here  # even if another version is being fetched
        with self._fetching:
            path = self._client.fetch(
                version, manifest_digest=manifest_digest, deadline_s=self._fetch_s
            )
            self._here[version, manifest_digest or ""] = path
            self.newest = max(version, self.newest)
            return path

    def keep(self, *versions: int) -> None:
        """Remove every version except these and the newest.

        If a fetch is under way, the next call removes them: a removal would delete the parts of the
        fetch, and waiting for it may take as long as a step.
        """
        if self._fetching.acquire(blocking=False):
            try:
                kept = {*versions, self.newest}
                for key in [key for key in self._here if key[0] not in kept]:
                    del self._here[key]
                self._client.prune(kept)
            finally:
                self._fetching.release()

    def _take_in(self, latest: Latest) -> None:
        self.get(latest.version, latest.manifest_digest)
