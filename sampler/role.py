"""The watch for versions of the roles that sample."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from concurrent.futures import CancelledError

from broadcast.client import WeightsClient
from runspec.core.errors import UserError
from runspec.core.latest import Latest
from verify.plugins import WeightsLocation

_POLL_S = 20.0
"""Seconds that one request for a newer version stays open."""
_RETRY_S = 1.0
_JOIN_S = 0.05


class VersionWatch(ABC):
    """Waits in a thread for announcements of newer versions, and has a client to fetch them with.

    Args:
        source: names relays or origins, and the folder that stores versions in `v<N>`.
        fetch_s: seconds after which a fetch is given up.
        log: receives errors of the watch.
    """

    def __init__(self, source: WeightsLocation, fetch_s: float, log: logging.Logger) -> None:
        self._news, self._client = (  # two, so a long poll delays no fetch
            WeightsClient(
                source.urls,
                run=source.run,
                root_public_key=source.root_public_key,
                cache_dir=source.cache_dir,
            )
            for _ in range(2)
        )
        self._fetch_s, self._log = fetch_s, log
        self.newest = -1
        """The newest version that was taken in; -1 if there is none."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="versions", daemon=True)

    @abstractmethod
    def _take_in(self, latest: Latest) -> None:
        """Take in a version newer than `newest`.

        Raises:
            UserError: it cannot be had now; it is asked for again.
        """

    def close(self) -> None:
        """End the watch and close the connections."""
        self._stop.set()
        while self._thread.is_alive():  # it may send another request before it checks `_stop`
            for client in (self._news, self._client):
                client.cancel()
            self._thread.join(_JOIN_S)
        for client in (self._news, self._client):
            client.close()

    def _watch(self) -> None:
        while not self._stop.is_set():
            try:
                latest = self._news.latest(None if self.newest < 0 else self.newest, _POLL_S)
                if latest is not None:
                    self._take_in(latest)
            except CancelledError:  # `close`
                return
            except UserError as error:
                self._log.warning("newer versions: %s", error)
                self._stop.wait(_RETRY_S)
