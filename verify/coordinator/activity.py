"""Who is alive and how busy: kept in memory, from requests and heartbeats."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

DEAD_AFTER_S = 30.0
"""Three heartbeats missed."""
_LEAST_INTERVAL_S = 5.0
"""Half of a heartbeat's. Rates over less, as when a load is told at once, would be noise."""
_MAX_FIELDS, _MAX_TEXT, _MAX_NUMBER = 16, 120, 10**15
Scalars = dict[str, str | float | int | None]


@dataclass
class Peer:
    """A worker or validator as its own process reports it."""

    last_seen: float
    info: Scalars = field(default_factory=dict)
    """What it said when it registered."""
    state: Scalars = field(default_factory=dict)
    """The last heartbeat."""
    busy_fraction: float | None = None
    """Share of the last interval between heartbeats in which it sampled."""
    tokens_per_s: float | None = None
    _since: tuple[float, float, float] | None = None
    """Time, busy_s and tokens of the heartbeat that the next rates count from."""

    def alive(self, now: float) -> bool:
        return now - self.last_seen < DEAD_AFTER_S

    def heartbeat(self, state: Scalars, now: float) -> None:
        self.state, self.last_seen = state, now
        busy_s, tokens = (_count(state.get(name)) for name in ("busy_s", "tokens"))
        if self._since is None or busy_s < self._since[1] or tokens < self._since[2]:
            self._since = (now, busy_s, tokens)  # its first, or its process began again
            return
        then, busy_before, tokens_before = self._since
        if (elapsed := now - then) >= _LEAST_INTERVAL_S:
            self.busy_fraction = min(1.0, (busy_s - busy_before) / elapsed)
            self.tokens_per_s = (tokens - tokens_before) / elapsed
            self._since = (now, busy_s, tokens)


class Activity:
    """The peers of one kind, by public key."""

    def __init__(self) -> None:
        self.peers: dict[str, Peer] = {}

    def seen(self, key: str, now: float) -> None:
        self.peers.setdefault(key, Peer(now)).last_seen = now

    def registered(self, key: str, info: Scalars, now: float) -> None:
        """Takes note of what a worker says about itself."""
        self.seen(key, now)
        self.peers[key].info = info

    def heartbeat(self, key: str, state: Mapping[str, Any], now: float) -> None:
        """Takes note of a heartbeat.

        Raises:
            ValueError: not a small map of scalars.
        """
        self.peers.setdefault(key, Peer(now)).heartbeat(scalars(state), now)

    def rates(self, now: float) -> tuple[float, float]:
        """Mean busy fraction and summed tokens per second of the peers that are alive."""
        alive = [p for p in self.peers.values() if p.alive(now)]
        busy = [p.busy_fraction for p in alive if p.busy_fraction is not None]
        tokens = [p.tokens_per_s for p in alive if p.tokens_per_s is not None]
        return (sum(busy) / len(busy) if busy else 0.0, sum(tokens))


def scalars(state: Mapping[str, Any]) -> Scalars:
    """What a peer sent, checked.

    Raises:
        ValueError: not a small map of scalars.
    """
    if len(state) > _MAX_FIELDS:
        raise ValueError(f"at most {_MAX_FIELDS} fields are allowed")
    for name, value in state.items():
        if not (value is None or isinstance(value, str | int | float)):
            raise ValueError(f"{name[:40]!r}: a number, a text or null was expected")
        if len(name) > _MAX_TEXT or (isinstance(value, str) and len(value) > _MAX_TEXT):
            raise ValueError(f"{name[:40]!r}: longer than {_MAX_TEXT} characters")
        if isinstance(value, int) and abs(value) > _MAX_NUMBER:
            raise ValueError(f"{name[:40]!r}: beyond {_MAX_NUMBER:g}")
    return dict(state)


def _count(value: object) -> float:
    valid = isinstance(value, int | float) and abs(value) <= _MAX_NUMBER and math.isfinite(value)
    return max(0.0, float(value)) if valid and isinstance(value, int | float) else 0.0
