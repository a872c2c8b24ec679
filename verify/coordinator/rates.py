"""How often a key may ask: token buckets, pure but for the memory of when each will be full again.

A bucket is one number, the time at which it is full again (the generic cell rate algorithm, ITU-T
I.371): each request moves it on by 1 / rate, and one that would move it further ahead than a burst
takes is refused. A bucket that is full again is as good as none and is forgotten, so the memory
holds only keys that asked lately, and never more than `MAX_BUCKETS`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MAX_BUCKETS = 100_000
MAX_POLLS = 4
"""Requests for a lease that one key may keep waiting: a worker has one, and another where a lost
connection has not been noticed."""


@dataclass(frozen=True)
class Rate:
    """So many requests a second in the long run, and `burst` at once."""

    per_s: float
    burst: int


WORKER_RATES = {
    "lease": Rate(20.0, 100),
    "submission": Rate(20.0, 100),
    "heartbeat": Rate(1.0, 10),
    "release": Rate(1.0, 10),
    "registration": Rate(1.0, 10),
}
"""Of one registered key, by kind of request. A worker asks for far less: what it samples takes
seconds at least."""
STRANGERS = Rate(20.0, 100)
"""Of all keys together that are no worker's, but for registrations."""
REGISTRATIONS = Rate(1.0, 64)
"""Of all new keys together: a fleet may start at once, a flood of keys cannot."""


class Buckets:
    """One bucket for each name.

    Args:
        max_buckets: names that are remembered; when so many asked lately, new ones are refused.
    """

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        self._max = max_buckets
        self._full_at: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._full_at)

    def take(self, name: str, rate: Rate, now: float) -> float:
        """Takes one token.

        Args:
            name: of the bucket.
            rate: its rate.
            now: seconds, never going back.

        Returns:
            0.0 when there was one; else seconds until there will be, and nothing was taken.
        """
        full_at = max(self._full_at.get(name, now), now)
        ahead = full_at + 1.0 / rate.per_s - now
        longest = rate.burst / rate.per_s
        if ahead > longest * (1.0 + 1e-9):
            return ahead - longest
        if name not in self._full_at and len(self._full_at) >= self._max:
            self._full_at = {n: at for n, at in self._full_at.items() if at > now}
            if len(self._full_at) >= self._max:
                return min(self._full_at.values()) - now
        self._full_at[name] = now + ahead
        return 0.0


class RateLimits:
    """Which bucket a request draws from."""

    def __init__(self) -> None:
        self._buckets = Buckets()
        self._polls: Counter[str] = Counter()

    def wait_s(self, key: str, kind: str, now: float, *, known: bool) -> float:
        """0.0 when a request may be answered; else seconds after which it may come again.

        Args:
            key: the caller's.
            kind: of `WORKER_RATES`.
            now: seconds.
            known: whether the key is a registered worker's.
        """
        if known:
            return self._buckets.take(f"{kind} {key}", WORKER_RATES[kind], now)
        if kind == "registration":
            return self._buckets.take("registrations", REGISTRATIONS, now)
        return self._buckets.take("strangers", STRANGERS, now)

    @contextmanager
    def poll(self, key: str) -> Iterator[bool]:
        """Counts a request that is kept waiting; yields whether the key may keep one more."""
        self._polls[key] += 1
        try:
            yield self._polls[key] <= MAX_POLLS
        finally:
            self._polls[key] -= 1
            if not self._polls[key]:
                del self._polls[key]
