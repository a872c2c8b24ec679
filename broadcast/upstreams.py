"""Which server to ask next: the ones that answer and tell the truth first, with healing."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from broadcast.transport import Fault, Lie, NotThere

RETRY_S = (0.1, 2.0)
"""First and longest pause after consecutive failures of a server; each doubles the last."""
DISTRUST_S = 60.0
"""For how long a server that sent something wrong is asked only where no other is left."""


@dataclass(eq=False)
class Upstream:
    """One server and what is known of it; times are of the monotonic clock, in seconds."""

    url: str
    in_flight: int = 0
    failures: int = 0
    retry_at: float = 0.0
    distrusted_until: float = 0.0
    last_fault: str = "not asked yet"

    def succeeded(self) -> None:
        self.failures = 0
        self.retry_at = 0.0

    def failed(self, fault: Fault, what: str, log: logging.Logger) -> None:
        """Notes a fault; a lie is logged with the server's name at once, the rest when new."""
        now = time.monotonic()
        text = f"{what}: {fault}"
        if isinstance(fault, Lie):
            self.distrusted_until = now + DISTRUST_S
            log.warning("%s sent something wrong: %s; avoiding it", self.url, text)
        elif text != self.last_fault and not isinstance(fault, NotThere):
            log.warning("%s: %s", self.url, text)
        self.last_fault = text
        first, longest = RETRY_S
        if isinstance(fault, NotThere):
            self.retry_at = now + first
        else:
            self.retry_at = now + min(longest, first * 2 ** min(self.failures, 10))
            self.failures += 1


class Upstreams:
    """The servers that one client or relay knows, in order of preference."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.all = [Upstream(url) for url in dict.fromkeys(urls)]

    def choose(self, avoid: Collection[Upstream] = ()) -> tuple[Upstream, float]:
        """The server to ask now, and the seconds to wait before asking it.

        Of those not pausing after a failure: not one of `avoid` before one of them, not a
        distrusted one before a trusted one, then the one with the fewest requests in flight.
        """
        now = time.monotonic()
        ready = [u for u in self.all if u.retry_at <= now]
        if not ready:
            soonest = min(self.all, key=lambda u: u.retry_at)
            return soonest, soonest.retry_at - now
        best = min(ready, key=lambda u: (u in avoid, u.distrusted_until > now, u.in_flight))
        return best, 0.0

    def faults(self) -> str:
        """What was last wrong with each, for a message."""
        return "; ".join(f"{u.url}: {u.last_fault}" for u in self.all)
