"""Connection of an island: the coordinator, its own store, and the servers of the others."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from learner_jax.islands.share_fetcher import ShareFetcher
from learner_jax.islands.share_store import ShareStore
from verify.formats.islands import CommitRecord
from verify.island_client import Committed, IslandClient

ATTEMPT_S = 60.0
"""Seconds of one try to fetch; the next one asks where the islands are now."""
REPORT_EVERY_S = 30.0
REJOIN = "remove this island's folder and its store, so that it joins anew"


@dataclass(frozen=True)
class Connection:
    """Connection of one island, in process 0 of its learner."""

    island: str
    url: str
    """Where the others find this island's store."""
    size: int
    """n: elements of a share, of theta, and of the momentum."""
    client: IslandClient
    store: ShareStore
    fetcher: ShareFetcher
    stop: threading.Event
    """Set when this process is told to end."""
    log: logging.Logger

    def record(self, step: int) -> CommitRecord | None:
        """Return the record of a step if there is one already."""
        answer = self.client.record(step, 0.0)
        return answer.record if isinstance(answer, Committed) else None
