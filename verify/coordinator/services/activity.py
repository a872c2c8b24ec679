"""Records which workers and validators are alive and how busy they are."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NO_VERSION = -1
"""`version` of a worker's heartbeat before it has loaded a version."""
DEAD_AFTER_S = 30.0
"""Seconds of silence after which a peer counts as dead: three heartbeats."""
_LEAST_INTERVAL_S = 5.0
"""Least number of seconds over which a rate is measured: half a heartbeat interval."""
_MAX_NUMBER = 10**15
_MAX_BYTES = 1024
"""Largest JSON size of a map that a peer sends."""
Scalars = dict[str, str | float | int | None]


@dataclass
class Peer:
    """A worker or validator, as its process reports it."""

    last_seen: float
    info: Scalars = field(default_factory=dict)
    """Information that the peer sent when it registered."""
    state: Scalars = field(default_factory=dict)
    """The last heartbeat."""
    busy_fraction: float | None = None
    """Share of the last interval between heartbeats in which it sampled; None before the first such
    interval with a loaded version."""
    tokens_per_s: float | None = None
    _since: tuple[float, float, float] | None = None
    """Time, busy_s and tokens of the heartbeat from which the next rates count."""

    def alive(self, now: float) -> bool:
        return now - self.last_seen < DEAD_AFTER_S

    def heartbeat(self, state: Scalars, now: float) -> None:
        self.state, self.last_seen = state, now
        busy_s, tokens = (_count(state.get(name)) for name in ("busy_s", "tokens"))
        began_again = self._since and (busy_s < self._since[1] or tokens < self._since[2])
        if state.get("version") == NO_VERSION or began_again:
            self._since = self.busy_fraction = self.tokens_per_s = None
        if state.get("version") == NO_VERSION:
            return  # the time in which its engine starts does not count in the rates
        if self._since is None:
            self._since = (now, busy_s, tokens)
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
        """Record what a worker reports about itself."""
        self.seen(key, now)
        self.peers[key].info = info

    def heartbeat(self, key: str, state: Mapping[str, Any], now: float) -> None:
        """Record a heartbeat.

        Raises:
            ValueError: `state` is not a small map of scalars.
        """
        checked = scalars(state)
        self.peers.setdefault(key, Peer(now)).heartbeat(checked, now)

    def busy_fraction(self, now: float) -> float | None:
        """Return the mean busy fraction of the live peers that have one; None if none has."""
        alive = [p.busy_fraction for p in self.peers.values() if p.alive(now)]
        known = [fraction for fraction in alive if fraction is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Peers:
    """Activity of all workers, validators and learner islands of a run."""

    workers: Activity = field(default_factory=Activity)
    validators: Activity = field(default_factory=Activity)
    islands: Activity = field(default_factory=Activity)
    """Activity of learner islands, by name instead of key."""


def scalars(state: Mapping[str, Any]) -> Scalars:
    """Check a map that a peer sent, and return a copy.

    Raises:
        ValueError: the map is large or has values that are not scalars.
    """
    for name, value in state.items():
        if not (value is None or isinstance(value, str | int | float)):
            raise ValueError(f"{name[:40]!r}: a number, a text or null was expected")
        if isinstance(value, int) and abs(value) > _MAX_NUMBER:
            raise ValueError(f"{name[:40]!r}: beyond {_MAX_NUMBER:g}")
    if len(json.dumps(state)) > _MAX_BYTES:
        raise ValueError(f"longer than {_MAX_BYTES} bytes of JSON")
    return dict(state)


def _count(value: object) -> float:
    valid = isinstance(value, int | float) and abs(value) <= _MAX_NUMBER and math.isfinite(value)
    return max(0.0, float(value)) if valid and isinstance(value, int | float) else 0.0
