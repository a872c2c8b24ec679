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
"""How long the first version may take to appear: a learner may have to compile and save it."""
_POLL_S = 20.0
"""How long one question for a newer version stays open."""
_RETRY_S = 1.0
_JOIN_S = 0.05


class Versions:
    """Fetches versions from relays into `cache_dir/v<N>`.

    Args:
        urls: of relays or origins.
        run, root_public_key: whose versions are believed.
        cache_dir: where they are kept; only what `keep` names and the newest stay.
        fetch_s: seconds after which a fetch is given up.
        log: told of what keeps the prefetch waiting.
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

        self._news, self._client = client(), client()  # a long poll holds no fetch up
        self._fetching = threading.Lock()
        self._fetch_s, self._log = fetch_s, log
        self.newest = -1
        """The newest version that is here; -1 where none is."""
        self._here: dict[tuple[int, str], Path] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._prefetch, name="prefetch", daemon=True)

    def first(self) -> tuple[int, Path]:
        """Waits for the newest version there is, fetches it, and begins to prefetch later ones.

        Raises:
            UserError: none by the deadline; the message names the relays.
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
        """The directory of a version: at once where it is here.

        Args:
            version: its number.
            manifest_digest: what a lease says of it; None for one that the publisher announced.

        Raises:
            UserError: not there in time, or not the version that the digest names.
        """
        for (number, digest), here in list(self._here.items()):
            if number == version and manifest_digest in (digest, None):
                return here  # whatever else is being fetched
        with self._fetching:
            path = self._client.fetch(
                version, manifest_digest=manifest_digest, deadline_s=self._fetch_s
            )
            self._here[version, manifest_digest or ""] = path
            self.newest = max(version, self.newest)
            return path

    def keep(self, *versions: int) -> None:
        """Removes every version but these and the newest; leaves that to the next call where a
        fetch is under way, which would lose its parts, and may take as long as a step."""
        if self._fetching.acquire(blocking=False):
            try:
                kept = {*versions, self.newest}
                for key in [key for key in self._here if key[0] not in kept]:
                    del self._here[key]
                self._client.prune(kept)
            finally:
                self._fetching.release()

    def close(self) -> None:
        """Ends the prefetch and closes the connections."""
        self._stop.set()
        while self._thread.is_alive():  # it may ask again between two looks at `_stop`
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
            except UserError as error:  # what a lease needs is fetched, and fails, in the open
                self._log.warning("prefetch: %s", error)
                self._stop.wait(_RETRY_S)
