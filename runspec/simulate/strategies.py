"""Strategies decide how a worker answers a lease: an honest one, and hostile ones.

A strategy sees what a worker sees: its leases, and the verdicts on its submissions.
"""

from __future__ import annotations

from collections.abc import Callable
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
    """Answers every lease alike: `honest`, `refuse`, `rubbish`, `wrong`, `withhold`."""

    def __init__(self, what: Content | Literal["withhold", "refuse"], think_s: float = 0.0) -> None:
        self._what, self._think_s = what, think_s

    def answer(self, lease: Lease, now: float) -> Answer:
        """Return the answer to a lease that was just granted."""
        return Answer(self._what, now + self._think_s)

    def judged(self, accepted: bool) -> None:
        """Handle a verdict on one of the worker's submissions."""

    def pause_s(self) -> float | None:
        """Return the seconds from a published version to its request; None: it always asks."""
        return None


class Delay(Strategy):
    """Samples honestly, and submits just before the lease ends, or some time after its grant."""

    def __init__(self, margin_s: float, after_s: float | None) -> None:
        super().__init__("rollouts")
        self._margin_s, self._after_s = margin_s, after_s

    def answer(self, lease: Lease, now: float) -> Answer:
        before_end = lease.expires - self._margin_s
        return Answer("rollouts", before_end if self._after_s is None else now + self._after_s)


class Alternate(Strategy):
    """Answers the first `honest` of every `of` leases, and misbehaves at the others."""

    def __init__(self, honest: int, of: int, misdeed: Strategy) -> None:
        super().__init__("rollouts")
        self._honest, self._of, self._misdeed = honest, of, misdeed
        self._seen = 0

    def answer(self, lease: Lease, now: float) -> Answer:
        turn, self._seen = self._seen % self._of, self._seen + 1
        return Answer("rollouts") if turn < self._honest else self._misdeed.answer(lease, now)


class Sleeper(Strategy):
    """Works honestly until some submissions are accepted, then always misbehaves."""

    def __init__(self, record: int, misdeed: Strategy) -> None:
        super().__init__("rollouts")
        self.missing, self._misdeed = record, misdeed

    def answer(self, lease: Lease, now: float) -> Answer:
        return Answer("rollouts") if not self.ready() else self._misdeed.answer(lease, now)

    def judged(self, accepted: bool) -> None:
        self.missing -= accepted

    def ready(self) -> bool:
        """Return whether the misdeeds begin."""
        return self.missing <= 0


class Colluder(Sleeper):
    """Sleeper of a group whose members misbehave once each has its record."""

    def __init__(self, record: int, misdeed: Strategy, group: list[Colluder]) -> None:
        super().__init__(record, misdeed)
        self._group = group
        group.append(self)

    def ready(self) -> bool:
        return all(member.missing <= 0 for member in self._group)


class Late(Sleeper):
    """Sleeper that, once it misbehaves, asks for leases late in a step."""

    def __init__(self, record: int, misdeed: Strategy, after_s: float) -> None:
        super().__init__(record, misdeed)
        self._after_s = after_s

    def pause_s(self) -> float | None:
        return self._after_s if self.ready() else None


def strategies(block: StrategyBlock) -> Callable[[], Strategy]:
    """Return a function that makes the strategy of each member of a group."""
    group: list[Colluder] = []

    def make() -> Strategy:
        misdeed = Strategy(block.misdeed, block.think)
        match block.kind:
            case "honest":
                return Strategy("rollouts")
            case "wrong":
                return Strategy("wrong")
            case "refuse" | "rubbish" | "withhold":
                return Strategy(block.kind, block.think)
            case "delay":
                return Delay(block.margin, block.after)
            case "alternate":
                return Alternate(block.honest, block.of, misdeed)
            case "sleeper":
                return Sleeper(block.record, misdeed)
            case "collude":
                return Colluder(block.record, misdeed, group)
            case "late":
                return Late(block.record, misdeed, block.after or 0.0)

    return make
