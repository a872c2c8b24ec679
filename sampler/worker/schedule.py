"""Schedule of a worker: a pure function from its leases and its engine to its next action.

The engine stays full across leases. The next lease is requested while the last ones are still being
sampled. If it is of the loaded version, it goes into the engine at once. If not, a pool whose
rollouts must be of one version lets the engine run empty and then loads. A pool with
`in_flight_updates` loads during sampling, and loads newer versions as soon as they are fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from verify.formats.lease import MAX_OPEN_LEASES

MAX_SAMPLING = 2
"""Leases in the engine: the newest, and one whose last sequences are left. More leases would be
missing for other workers in a small step, and older than if requested later."""

Stage = Literal["waiting", "sampling", "finishing"]
"""`waiting` for the engine; `sampling` in it; `finishing`: being graded, proved and submitted."""


@dataclass
class OpenLease:
    """An open lease of the worker."""

    digest: str
    version: int
    stage: Stage


@dataclass(frozen=True)
class Situation:
    """Everything that the next action follows from."""

    leases: Sequence[OpenLease]
    """In the order of their grants."""
    loaded: int | None
    """Version that the engine samples from."""
    running: int
    """Sequences in the engine."""
    capacity: int
    """Number of sequences that the engine runs at once."""
    asking: bool
    """Whether a request for a lease is under way."""
    in_flight: bool
    """Whether a version may change in the middle of a rollout."""
    newest: int
    """Newest version on this machine; used if `in_flight`."""


@dataclass(frozen=True)
class Ask:
    """Ask for the next lease, in the background."""


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
    """Return the next action; call it again after each action until it is `Wait`."""
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
