"""Policy versions on this machine: the newest is fetched while the current one samples."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from concurrent.futures import CancelledError
from pathlib import Path

from broadcast.client import WeightsClient
from runspec.core.errors import UserError

FIRST_S = 600.0
"""Seconds until the first version must appear; a learner may have to compile and save it."""
_POLL_S = 20.0
"""Seconds that one request for a newer version stays open."""
_RETRY_S = 1.0
_JOIN_S = 0.05


class Versions:
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

        self._news, self._client = client(), client()  # two, so a long poll delays no fetch
        self._fetching = threading.Lock()
        self._fetch_s, self._log = fetch_s, log
        self.newest = -1
        """The newest version on this machine; -1 if there is none."""
        self._here: dict[tuple[int, str], Path] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._prefetch, name="prefetch", daemon=True)

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

    def close(self) -> None:
        """End the prefetch and close the connections."""
        self._stop.set()
        while self._thread.is_alive():  # it may send another request before it checks `_stop`
            for client in (self._news, self._client):
                client.cancel()
            self._thread.join(_JOIN_S)
        for client in (self._news, self._client):
            client.close()

    def _prefetch(self) -> None:
        while not self._stop.is_set():
            try:
                latest = self._news.latest(self.newest, _POLL_S)
                if latest is not None:
                    self.get(latest.version, latest.manifest_digest)
            except CancelledError:  # `close`
                return
            except UserError as error:  # `get` raises for versions that a lease needs
                self._log.warning("prefetch: %s", error)
                self._stop.wait(_RETRY_S)
