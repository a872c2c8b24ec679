"""Which workers and validators are alive and how busy they are, from requests and heartbeats."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

NO_VERSION = -1
"""`version` of a worker's heartbeat until it has loaded its first."""
DEAD_AFTER_S = 30.0
"""Three heartbeats missed."""
_LEAST_INTERVAL_S = 5.0
"""Half of the time between heartbeats; a rate over less would be noise."""
_MAX_NUMBER = 10**15
_MAX_BYTES = 1024
"""Size of a map in the status."""
Scalars = dict[str, str | float | int | None]


@dataclass
class Peer:
    """A worker or validator, as its own process reports it."""

    last_seen: float
    info: Scalars = field(default_factory=dict)
    """Information that the peer sent when it registered."""
    state: Scalars = field(default_factory=dict)
    """The last heartbeat."""
    busy_fraction: float | None = None
    """Share of the last interval between heartbeats in which it sampled; None until there is one
    since its first version was loaded."""
    tokens_per_s: float | None = None
    _since: tuple[float, float, float] | None = None
    """Time, busy_s and tokens of the heartbeat that the next rates count from."""

    def alive(self, now: float) -> bool:
        return now - self.last_seen < DEAD_AFTER_S

    def heartbeat(self, state: Scalars, now: float) -> None:
        self.state, self.last_seen = state, now
        busy_s, tokens = (_count(state.get(name)) for name in ("busy_s", "tokens"))
        began_again = self._since and (busy_s < self._since[1] or tokens < self._since[2])
        if state.get("version") == NO_VERSION or began_again:
            self._since = self.busy_fraction = self.tokens_per_s = None
        if state.get("version") == NO_VERSION:
            return  # its engine starts: this time does not count in its rates
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
        """Records what a worker reports about itself."""
        self.seen(key, now)
        self.peers[key].info = info

    def heartbeat(self, key: str, state: Mapping[str, Any], now: float) -> None:
        """Records a heartbeat.

        Raises:
            ValueError: not a small map of scalars.
        """
        checked = scalars(state)
        self.peers.setdefault(key, Peer(now)).heartbeat(checked, now)

    def busy_fraction(self, now: float) -> float | None:
        """Mean busy fraction of the peers that are alive and have one; None where none has."""
        alive = [p.busy_fraction for p in self.peers.values() if p.alive(now)]
        known = [fraction for fraction in alive if fraction is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class Peers:
    """Activity of everybody who works for the run."""

    workers: Activity = field(default_factory=Activity)
    validators: Activity = field(default_factory=Activity)


def scalars(state: Mapping[str, Any]) -> Scalars:
    """Check a map that a peer sent, and return a copy.

    Raises:
        ValueError: not a small map of scalars.
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
