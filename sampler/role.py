"""What the roles that sample have in common: their command line, and the watch for versions."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path

from broadcast.client import WeightsClient
from runspec.core.errors import UserError
from runspec.core.latest import Latest

_POLL_S = 20.0
"""Seconds that one request for a newer version stays open."""
_RETRY_S = 1.0
_JOIN_S = 0.05


@dataclass(frozen=True)
class RoleOptions:
    """Options of the command line of a worker or an evaluator."""

    run: str
    coordinator: str
    weights: list[str]
    public_key: str
    key: Path
    dir: Path
    metrics: str | None = field(default=None, kw_only=True)
    """Where the figures are served, see `serve_metrics`."""


class VersionWatch(ABC):
    """Waits in a thread for announcements of newer versions, and has a client to fetch them with.

    Args:
        client: makes a client of relays and origins.
        log: receives errors of the watch.
    """

    def __init__(self, client: Callable[[], WeightsClient], log: logging.Logger) -> None:
        self._news, self._client = client(), client()  # two, so a long poll delays no fetch
        self._log = log
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
