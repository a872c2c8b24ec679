"""The result of a simulated run, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class StepResult:
    """One closed step. Times in seconds from the publication of version 0; the rest is groups."""

    number: int
    opened: float
    closed: float
    trained_at: float | None
    """When its training ended; None: the run ended before."""
    groups: int
    """That it trains."""
    leased: int
    withheld: int
    """Withheld, late, or struck."""
    rejected: int
    filtered: int


@dataclass(frozen=True)
class GroupResult:
    """The outcome of one group of the population."""

    name: str
    strategy: str
    workers: int
    leases: int
    accepted: int
    """Submissions; so are the next two."""
    rejected: int
    withheld: int
    """Leases without a submission."""
    sampled: int
    """Rollouts; so are the next two."""
    trained: int
    wasted: int
    """Sampled, and neither trained nor filtered nor still of use when the run ended."""
    idle: float | None
    """Share of its presence in which the engines did nothing; None where nobody came."""


@dataclass(frozen=True)
class Sanction:
    """A quarantine or ban, or its end."""

    at: float
    worker: str
    what: str
    """`quarantined`, `banned` or `free`."""
    reason: str


@dataclass(frozen=True)
class Result:
    """A simulated run."""

    seed: int
    ended: str
    """`finished`, `stalled`, or `max_hours`: `budget.max_hours`, or `run.LONGEST_H`, is over."""
    reason: str
    """Why the run stalled, with what the step waited for; else, what the next step waits for."""
    remedy: str
    seconds: float
    steps: tuple[StepResult, ...]
    """The closed ones."""
    groups: tuple[GroupResult, ...]
    sanctions: tuple[Sanction, ...]
    idle_learner: float
    """Share of the time between the first and the last end of a training step."""
    idle_validators: float | None
    """Share of the whole time, a mean over the validators; None without one."""
    waits: dict[str, float]
    """Seconds in which the next step to close waited for workers, validators or the publisher."""

    @property
    def trained(self) -> list[float]:
        """When each trained step ended."""
        return [step.trained_at for step in self.steps if step.trained_at is not None]

    @property
    def steps_per_hour(self) -> float | None:
        """Between the first and the last end of a training step; None with fewer than two."""
        times = self.trained
        return 3600.0 * (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None

    @property
    def wasted_share(self) -> float | None:
        """Share of the rollouts of honest workers that was wasted; None where they made none."""
        honest = [group for group in self.groups if group.strategy == "honest"]
        sampled = sum(group.sampled for group in honest)
        return sum(group.wasted for group in honest) / sampled if sampled else None

    def to_json(self) -> dict[str, Any]:
        """Plain data under stable keys, properties that people read included."""
        return {
            **asdict(self),
            "steps_per_hour": self.steps_per_hour,
            "wasted_share": self.wasted_share,
        }
