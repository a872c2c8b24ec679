"""Strategies decide how a worker answers a lease: an honest one, and hostile ones.

A strategy sees what a worker sees: its leases, and the verdicts on its submissions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from runspec.simulate.population import StrategyBlock
from verify.formats.lease import Lease

Content = Literal["rollouts", "wrong", "rubbish"]
"""`wrong` looks like rollouts and fails recomputation; `rubbish` cannot be parsed."""


@dataclass(frozen=True)
class Answer:
    """Answer of a worker to a lease."""

    what: Content | Literal["withhold", "refuse"]
    """`refuse`: the lease is released."""
    not_before: float = 0.0
    """Earliest time at which it is submitted or released."""


class Strategy:
    """One worker's strategy.

    Args:
        block: of the swarm file.
        group: strategies of the workers of its group that exist already; it adds itself.
    """

    def __init__(self, block: StrategyBlock, group: list[Strategy]) -> None:
        self._block, self._seen = block, 0
        self._members = group if block.kind == "collude" else [self]
        self.missing = block.record if block.kind in ("sleeper", "collude", "late") else 0
        """Accepted submissions that it wants before its first misdeed."""
        group.append(self)

    def answer(self, lease: Lease, now: float) -> Answer:
        """Return the answer to a lease that was just granted."""
        block = self._block
        turn, self._seen = self._seen % block.of, self._seen + 1
        match block.kind:
            case "honest" | "wrong":
                return Answer("wrong" if block.kind == "wrong" else "rollouts", now)
            case "refuse" | "rubbish" | "withhold":
                return Answer(block.kind, now + block.think)
            case "delay":
                end = lease.expires - block.margin
                return Answer("rollouts", end if block.after is None else now + block.after)
            case "alternate":
                honest = turn < block.honest
            case "sleeper" | "collude" | "late":
                honest = not self.ready()
        return Answer("rollouts") if honest else Answer(block.misdeed, now + block.think)

    def judged(self, accepted: bool) -> None:
        """Handle a verdict on one of the worker's submissions."""
        self.missing -= accepted

    def ready(self) -> bool:
        """Return whether it has its record; of colluders, whether all of the group have."""
        return all(member.missing <= 0 for member in self._members)

    def pause_s(self) -> float | None:
        """Return the seconds from a published version to its request; None: it always asks."""
        return (self._block.after or 0.0) if self._block.kind == "late" and self.ready() else None
