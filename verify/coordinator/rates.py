"""How often a key, or an address, may ask: token buckets, pure but for a memory of each.

A bucket is one number, the time at which it is full again (the generic cell rate algorithm, ITU-T
I.371): each request moves it on by 1 / rate, and one that would move it further ahead than a burst
takes is refused. A bucket that is full again is as good as none and is forgotten, so the memory
holds only names that asked lately, and never more than `MAX_BUCKETS`.

A registered key has buckets of its own. Whoever is no worker costs nothing to be many of, so those
count by the place that they ask from (`verify.coordinator.addresses`): a flood hurts its own
place. Above that are generous bounds of all places together, so that floods from many places do
not take more than the coordinator has; workers that are registered are not under them. Places and
keys are remembered apart, so that neither crowds out the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MAX_BUCKETS = 100_000
MAX_DOWNLOADS, MAX_DOWNLOADS_PER_PLACE = 256, 32
"""Files of the data that are being sent: to whoever takes them slowly, for long."""
MAX_BODIES, MAX_BODIES_PER_PLACE, MAX_BODIES_PER_KEY = 1024, 64, 8
"""Bodies of JSON requests that are on their way: by key of those with accepted work, of all others
by place and together. While one is waited for its connection makes no room, so those beyond have to
hurry."""
MAX_POLLS = 4
"""Requests for a lease that one key may keep waiting: a worker has one, and another where a lost
connection has not been noticed."""
MAX_NEWCOMER_POLLS, MAX_NEWCOMER_POLLS_PER_PLACE = 256, 64
"""The same of all keys without accepted work together, but for the run's own: each event wakes all
who wait, and thousands would keep the coordinator from everything else. Those who were invited are
counted apart, and a place has a part only: else one that lets many keys wait keeps out all others,
and a run that nobody has done any work for would never have any."""


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
PER_PLACE = {
    "registration": Rate(0.2, 64),
    "stranger": Rate(5.0, 50),
    "public": Rate(50.0, 500),
    "unbelieved": Rate(20.0, 200),
}
"""Of one place. Registration: of keys that are new, for a fleet may start at once, a flood of keys
cannot; stranger: other requests of keys that are no worker's; public: what is not signed and need
not be; unbelieved: what should be signed and is not, a signature checked in vain each time."""
TOGETHER = {
    "registration": Rate(10.0, 1000),
    "stranger": Rate(100.0, 1000),
    "public": Rate(200.0, 2000),
}
"""Of all places. Of the unbelieved there is none: it would keep out who can be believed."""


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

    def wait_s(self, name: str, rate: Rate, now: float) -> float:
        """What `take` would return; nothing is taken."""
        ahead = max(self._full_at.get(name, now), now) + 1.0 / rate.per_s - now
        longest = rate.burst / rate.per_s
        return ahead - longest if ahead > longest * (1.0 + 1e-9) else 0.0

    def take(self, name: str, rate: Rate, now: float) -> float:
        """Takes one token.

        Args:
            name: of the bucket.
            rate: its rate.
            now: seconds, never going back.

        Returns:
            0.0 when there was one; else seconds until there will be, and nothing was taken.
        """
        if (wait_s := self.wait_s(name, rate, now)) > 0.0:
            return wait_s
        if name not in self._full_at and len(self._full_at) >= self._max:
            self._full_at = {n: at for n, at in self._full_at.items() if at > now}
            if len(self._full_at) >= self._max:
                return min(self._full_at.values()) - now
        self._full_at[name] = max(self._full_at.get(name, now), now) + 1.0 / rate.per_s
        return 0.0


class RateLimits:
    """Which buckets a request draws from.

    Args:
        max_bodies: of `MAX_BODIES`, where there are few connections.
    """

    def __init__(self, max_bodies: int = MAX_BODIES) -> None:
        self._keys, self._places = Buckets(), Buckets()
        self._max_bodies = max_bodies
        self._bodies: Counter[str] = Counter()
        self._polls: Counter[str] = Counter()
        self._newcomer_polls: Counter[str] = Counter()
        self._downloads: Counter[str] = Counter()

    def of_worker(self, key: str, kind: str, now: float) -> float:
        """A request of a registered key.

        Args:
            key: the worker's.
            kind: of `WORKER_RATES`.
            now: seconds.

        Returns:
            0.0 when it may be answered; else seconds after which it may come again.
        """
        return self._keys.take(f"{kind} {key}", WORKER_RATES[kind], now)

    def of_stranger(self, place: str, kind: str, now: float) -> float:
        """The same of a request of anybody else's; `kind` is one of `TOGETHER`."""
        wait_s = self._places.take(f"{kind} {place}", PER_PLACE[kind], now)
        # First its own: what a flood is refused there takes nothing from the others.
        return wait_s or self._places.take(kind, TOGETHER[kind], now)

    def unbelieved(self, place: str, now: float) -> None:
        """Counts a request that was not believed."""
        self._places.take(f"unbelieved {place}", PER_PLACE["unbelieved"], now)

    def of_unbelieved(self, place: str, now: float) -> float:
        """0.0 while another signature from there may be checked; else seconds until one may."""
        return self._places.wait_s(f"unbelieved {place}", PER_PLACE["unbelieved"], now)

    @contextmanager
    def download(self, place: str) -> Iterator[bool]:
        """Counts a file that is being sent; yields whether it may be."""
        self._downloads[place] += 1
        try:
            here, all_ = self._downloads[place], self._downloads.total()
            yield here <= MAX_DOWNLOADS_PER_PLACE and all_ <= MAX_DOWNLOADS
        finally:
            self._downloads[place] -= 1
            if not self._downloads[place]:
                del self._downloads[place]

    @contextmanager
    def body(self, key: str | None, place: str) -> Iterator[bool]:
        """Counts a body that is on its way; yields whether it may take its time.

        Args:
            key: of a worker with accepted work; None of anybody else's.
            place: which it comes from.
        """
        names = [key] if key is not None else [f"from {place}", "together"]
        self._bodies.update(names)
        here = self._bodies[names[0]]
        try:
            if key is not None:
                yield here <= MAX_BODIES_PER_KEY
            else:
                yield (
                    here <= MAX_BODIES_PER_PLACE and self._bodies["together"] <= self._max_bodies
                )
        finally:
            self._bodies.subtract(names)
            if not self._bodies[names[0]]:
                del self._bodies[names[0]]

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

    @contextmanager
    def newcomer_poll(self, place: str, *, invited: bool) -> Iterator[bool]:
        """The same of a key without accepted work, beside all others of them."""
        all_ = "invited" if invited else "by themselves"
        here = f"{all_} {place}"
        self._newcomer_polls.update((all_, here))
        try:
            yield (
                self._newcomer_polls[here] <= MAX_NEWCOMER_POLLS_PER_PLACE
                and self._newcomer_polls[all_] <= MAX_NEWCOMER_POLLS
            )
        finally:
            self._newcomer_polls.subtract((all_, here))
            if not self._newcomer_polls[here]:
                del self._newcomer_polls[here]
