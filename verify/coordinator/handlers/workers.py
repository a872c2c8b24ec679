"""What is known of the workers of a run: their activity, a summary of all, and each by pages."""

from __future__ import annotations

import heapq
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runspec.core.errors import one_line
from runspec.core.schema import RunSpec
from verify import HEARTBEAT_S
from verify.coordinator.ledger import damaged, read_events
from verify.coordinator.ledger.store import NoLedger
from verify.coordinator.machine.events import Event, IllegalTransition
from verify.coordinator.machine.state import Policy, State
from verify.coordinator.machine.transitions import replay
from verify.coordinator.machine.trust import reputation

NO_VERSION = -1
"""`version` of a worker's heartbeat before it has loaded a version."""
MISSED = 3
"""Heartbeats that a peer misses until it counts as dead."""
MOST_HEARTBEATS_PER_S = 50.0
"""Heartbeats a second of all workers; more workers send them more rarely."""
_LEAST_INTERVAL_S = 5.0
"""Least number of seconds over which a rate is measured: half a heartbeat interval."""
_MAX_NUMBER = 10**15
_MAX_BYTES = 1024
"""Largest JSON size of a map that a peer sends."""
Scalars = dict[str, str | float | int | None]
SHOWN = 100
"""Workers that a summary has, those with the most credit."""
PAGE = 250
"""Most entries of a page."""
_MAX_REASON = 200
PAIRS = 20
"""Pools with devices that a summary has."""
_VERSIONS = 20
"""Versions that a summary names."""
LISTS = ("workers", "banned", "invites")
"""Lists that are read by pages."""


# -- Activity ------------------------------------------------------------------------------------


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
    every_s: float = HEARTBEAT_S
    """Seconds until its next heartbeat, as it was told."""
    _since: tuple[float, float, float] | None = None
    """Time, busy_s and tokens of the heartbeat from which the next rates count."""

    def alive(self, now: float) -> bool:
        return now - self.last_seen < MISSED * self.every_s

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
        self._alive, self._counted = 0, -math.inf
        """Peers that were alive when they were counted, and when."""

    def seen(self, key: str, now: float) -> None:
        self.peers.setdefault(key, Peer(now)).last_seen = now

    def registered(self, key: str, info: Scalars, now: float) -> None:
        """Record what a worker reports about itself."""
        self.seen(key, now)
        self.peers[key].info = info

    def heartbeat(self, key: str, state: Mapping[str, Any], now: float) -> float:
        """Record a heartbeat; return the seconds until the peer's next.

        Raises:
            ValueError: `state` is not a small map of scalars.
        """
        checked = scalars(state)
        peer = self.peers.setdefault(key, Peer(now))
        peer.heartbeat(checked, now)
        if abs(now - self._counted) >= HEARTBEAT_S:
            self._alive, self._counted = sum(p.alive(now) for p in self.peers.values()), now
        peer.every_s = max(HEARTBEAT_S, self._alive / MOST_HEARTBEATS_PER_S)
        return peer.every_s

    def busy_fraction(self, now: float) -> float | None:
        """Return the mean busy fraction of the live peers that have one; None if none has."""
        alive = [p.busy_fraction for p in self.peers.values() if p.alive(now)]
        known = [fraction for fraction in alive if fraction is not None]
        return sum(known) / len(known) if known else None


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


# -- Reports -------------------------------------------------------------------------------------


def summary(state: State, seen: Activity | None = None, now: float = 0.0) -> dict[str, Any]:
    """Return `workers`, the first of them by credit, and `crowd`, figures of all.

    Args:
        state: state of the run.
        seen: activity of the workers since the coordinator started; None: none.
        now: seconds since the epoch.
    """

    def order(key: str) -> tuple[int, int]:
        worker = state.workers[key]
        return -worker.accepted_tokens, worker.number

    first = heapq.nsmallest(SHOWN, state.workers, key=order)
    known = seen.peers if seen else {}
    alive = [peer for key, peer in known.items() if key in state.workers and peer.alive(now)]
    versions = Counter(peer.state.get("version") for peer in alive)
    return {
        "workers": rows(state, first, seen, now),
        "crowd": {
            "registered": len(state.workers),
            "alive": len(alive),
            "banned": len(state.bans),
            "versions": [
                [version, count]
                for version, count in versions.most_common(_VERSIONS)
                if isinstance(version, int)
            ],
        },
        "pairs": _pairs(state),
    }


def _pairs(state: State) -> list[dict[str, Any]]:
    """Return what is known of each pool and devices with workers, the most workers first."""
    found: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for worker in state.workers.values():
        found[worker.pool, worker.devices] += Counter(
            workers=1,
            accepted_submissions=worker.standing.accepted,
            rejected_submissions=worker.standing.rejected,
            probation=worker.probation,
        )
    most = heapq.nlargest(PAIRS, found.items(), key=lambda each: each[1]["workers"])
    counts = ("workers", "accepted_submissions", "rejected_submissions")
    return [
        {"pool": pool, "devices": devices, "probation": sums["probation"] > 0}
        | {name: sums[name] for name in counts}
        for (pool, devices), sums in most
    ]


def page(
    name: str, after: str, state: State, seen: Activity | None = None, now: float = 0.0
) -> dict[str, Any]:
    """Return a page of a list: its entries by key, and the key after which the next page begins.

    Args:
        name: one of `LISTS`.
        after: last key of the page before; empty for the first.
        state, seen, now: see `summary`.

    Returns:
        The list's name: its entries; `next`: the last key, or null where nothing follows.
    """
    every: Iterable[str] = state.workers
    if name == "banned":
        every = state.bans
    elif name == "invites":
        every = {*state.invited, *state.revoked}
    keys = heapq.nsmallest(PAGE + 1, (key for key in every if key > after))
    entries: list[dict[str, Any]]
    if name == "workers":
        entries = rows(state, keys[:PAGE], seen, now)
        for entry in entries:
            del entry["silent_s"]  # it would change the page at every request
    elif name == "banned":
        entries = [{"key": key, "reason": state.bans[key]} for key in keys[:PAGE]]
    else:
        entries = [
            {"key": key, "used": state.invited.get(key, 0), "revoked": state.revoked.get(key)}
            for key in keys[:PAGE]
        ]
    return {name: entries, "next": keys[PAGE - 1] if len(keys) > PAGE else None}


def rows(
    state: State, keys: Iterable[str], seen: Activity | None = None, now: float = 0.0
) -> list[dict[str, Any]]:
    """Return what is known of workers; see `summary`."""
    open_leases = Counter(r.lease.worker for r in state.leases.values() if r.status == "open")
    known = seen.peers if seen else {}
    return [_worker(state, key, open_leases[key]) | activity(known.get(key), now) for key in keys]


def _worker(state: State, key: str, open_leases: int) -> dict[str, Any]:
    worker, ban = state.workers[key], state.bans.get(key)
    standing = worker.standing
    place = "probation" if worker.probation else worker.rank.name.lower()
    if ban is not None or standing.quarantine is not None:
        place = "quarantined" if ban is None else "banned"
    return {
        "key": key,
        "pool": worker.pool,
        "devices": worker.devices,
        "invite": worker.invite,
        "accepted_rollouts": worker.accepted_rollouts,
        "accepted_tokens": worker.accepted_tokens,
        "accepted_submissions": standing.accepted,
        "rejected_submissions": standing.rejected,
        "withheld_leases": standing.withheld,
        "reputation": round(reputation(standing), 4),
        "prefill_share": round(state.share_of(key), 4),
        "gap_excess": round(worker.gap_excess, 4),
        "standing": place,
        "reason": one_line(ban or standing.quarantine or "", _MAX_REASON),
        "open_leases": open_leases,
    }


def activity(peer: Peer | None, now: float) -> dict[str, Any]:
    """Return what a worker or validator reports about itself."""
    if peer is None:  # it has sent no request since the coordinator started
        return {"alive": False, "silent_s": None, "info": {}, "state": {}}
    return {
        "alive": peer.alive(now),
        "silent_s": round(now - peer.last_seen, 3),
        "info": peer.info,
        "state": peer.state,
        "busy_fraction": peer.busy_fraction,
        "tokens_per_s": peer.tokens_per_s,
    }


def read_state(run_dir: Path, spec: RunSpec) -> State:
    """Return the state of a run without a coordinator, from its ledger.

    Raises:
        UserError: it cannot be read.
    """
    policy = Policy.of(spec)
    try:
        return replay(policy, [*read_events(run_dir, spec, Event)])
    except NoLedger:  # no coordinator was started
        return State(policy)
    except IllegalTransition as error:
        raise damaged(run_dir, f"it cannot be replayed: {error}") from error
