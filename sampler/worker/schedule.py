"""What a worker does next: a pure function of what it holds and of what its engine does.

The engine is kept full across leases: the next lease is asked for while the last ones are still
being sampled, and goes into the engine at once where it is of the version that is loaded. Where it
is not, an untrusted pool lets the engine run dry and loads, since a rollout must be of one version;
a pool with `in_flight_updates` loads in the middle, and newer versions as soon as they are here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from verify.formats.lease import MAX_OPEN_LEASES

MAX_SAMPLING = 2
"""Leases in the engine: the newest, and one whose last sequences are left. More would be taken from
other workers of a small step, and be of an older version than if they were asked for later."""

Stage = Literal["waiting", "sampling", "finishing"]
"""`waiting` for the engine; `sampling` in it; `finishing`: graded, proved and handed in."""


@dataclass
class OpenLease:
    """A lease that the worker holds."""

    digest: str
    version: int
    stage: Stage


@dataclass(frozen=True)
class Situation:
    """Everything that the next action follows from."""

    leases: Sequence[OpenLease]
    """In the order in which they came."""
    loaded: int | None
    """Version that the engine samples from."""
    running: int
    """Sequences in the engine."""
    capacity: int
    """Sequences that are worth having there."""
    asking: bool
    """Whether the coordinator is being asked for a lease."""
    in_flight: bool
    """Whether a version may change in the middle of a rollout."""
    newest: int
    """Newest version on this machine; looked at where `in_flight`."""


@dataclass(frozen=True)
class Ask:
    """Ask for the next lease, beside the sampling."""


@dataclass(frozen=True)
class Load:
    """Switch the engine to a version."""

    version: int


@dataclass(frozen=True)
class Submit:
    """Give a lease's requests to the engine."""

    digest: str


@dataclass(frozen=True)
class Wait:
    """Nothing can be done until something happens."""


Action = Ask | Load | Submit | Wait


def next_action(now: Situation) -> Action:
    """What to do; asked again after each action until it is `Wait`."""
    waiting = [lease for lease in now.leases if lease.stage == "waiting"]
    if now.in_flight:
        wanted = max([now.newest, *(lease.version for lease in waiting)])
        if now.loaded is None or wanted > now.loaded:
            return Load(wanted)
        if waiting:
            return Submit(waiting[0].digest)
    else:
        for lease in waiting:
            if lease.version == now.loaded:
                return Submit(lease.digest)
        if waiting and now.running == 0:
            return Load(waiting[0].version)
    sampling = sum(lease.stage == "sampling" for lease in now.leases)
    room = 2 * now.running < now.capacity and sampling < MAX_SAMPLING
    if room and not (waiting or now.asking) and len(now.leases) < MAX_OPEN_LEASES:
        return Ask()
    return Wait()
