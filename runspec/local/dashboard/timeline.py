"""Who worked and who waited for whom, as spans of time by lane.

Spans come from the ledger (steps, leases, verdicts), from metrics.jsonl (the learner) and from the
evaluator's results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from runspec.local.metrics import Row
from verify.coordinator.machine.events import (
    Event,
    LeaseExpired,
    LeaseGranted,
    LeaseReleased,
    NonceDrawn,
    StepClosed,
    SubmissionJudged,
    SubmissionReceived,
    VersionPublished,
)
from verify.formats.evaluation import Evaluated

MOST = 4000
"""Newest spans that are kept of each source."""
Span = tuple[str, float, float, str, str]
"""Lane, start and end in seconds since the epoch, kind, label."""


class Timeline:
    """Spans of the newest work."""

    def __init__(self) -> None:
        self._spans: deque[Span] = deque(maxlen=MOST)
        self._leases: dict[str, LeaseGranted] = {}
        self._received: dict[str, tuple[float, int]] = {}
        """When a submission came, and its step, by lease."""
        self._opened: dict[int, float] = {}

    def take(self, event: Event) -> None:
        """Follow an event of the ledger."""
        if isinstance(event, LeaseGranted):
            self._leases[event.digest] = event
        elif isinstance(event, SubmissionReceived):
            self._lease_ended(event.lease, event.at, "sampling")
        elif isinstance(event, LeaseExpired):
            self._lease_ended(event.lease, event.at, "withheld")
        elif isinstance(event, LeaseReleased):
            self._leases.pop(event.lease, None)
        elif isinstance(event, SubmissionJudged):
            came, step = self._received.pop(event.lease, (event.at, 0))
            label = f"step {step}: {'accepted' if event.accepted else event.reason}"
            kind = "judging" if event.accepted else "rejected"
            self._spans.append((f"validator {event.validator[:8]}", came, event.at, kind, label))
        elif isinstance(event, NonceDrawn):
            self._opened.setdefault(event.step, event.at)
        elif isinstance(event, StepClosed):
            opened = self._opened.pop(event.step, event.at)
            label = f"step {event.step}: {len(event.trained)} groups"
            self._spans.append(("coordinator", opened, event.at, "filling", label))
        elif isinstance(event, VersionPublished):
            label = f"version {event.version} is published"
            self._spans.append(("publisher", event.at, event.at, "published", label))

    def _lease_ended(self, digest: str, at: float, kind: str) -> None:
        if (granted := self._leases.pop(digest, None)) is None:
            return
        lease = granted.lease
        label = f"step {lease.step}: {lease.groups} groups by version {lease.version}"
        lane = f"{lease.pool} {lease.worker[:8]}"
        self._spans.append((lane, granted.at, at, kind, label))
        if kind == "sampling":
            self._received[digest] = at, lease.step

    def spans(self, rows: Sequence[Row], evaluations: Iterable[Evaluated]) -> dict[str, Any]:
        """Return the spans by lane, each in order of time, and the least time.

        Args:
            rows: metrics.jsonl, a row a step, in order.
            evaluations: results of evaluations.
        """
        spans = [*_learner(rows[-MOST:]), *self._spans, *_evaluator(evaluations)]
        lanes: dict[str, list[tuple[float, float, str, str]]] = {}
        origin = min((start for _, start, *_ in spans), default=0.0)
        for lane, start, end, kind, label in spans:
            lanes.setdefault(lane, []).append(
                (round(start - origin, 2), round(max(end, start) - origin, 2), kind, label)
            )
        ordered = sorted(lanes, key=_rank)
        return {"origin": origin, "lanes": [[lane, sorted(lanes[lane])] for lane in ordered]}


def _rank(lane: str) -> tuple[int, str]:
    first = ("learner", "publisher", "coordinator")
    return (first.index(lane), "") if lane in first else (len(first), lane)


def _learner(rows: Sequence[Row]) -> Iterable[Span]:
    """Yield a step's waits, then its work; within a step their order is not recorded."""
    for row in rows:
        end, worked = row.get("time"), row.get("train_s") or 0.0
        if not isinstance(end, int | float):
            continue
        step = f"step {row['step']}"
        waits = {whom: s for whom, s in (row.get("waits") or {}).items() if s}
        at = end - worked - sum(waits.values())
        for whom, seconds in waits.items():
            yield "learner", at, at + seconds, "waiting", f"{step}: waits for the {whom}"
            at += seconds
        yield "learner", end - worked, end, "training", f"{step}: trains"


def _evaluator(evaluations: Iterable[Evaluated]) -> Iterable[Span]:
    for each in (each for each in evaluations if each.wall_s > 0.0):  # others are the learner's
        label = f"{each.evaluation} of version {each.version}, {each.cpu_s:.1f} s of processors"
        yield "evaluator", each.finished - each.wall_s, each.finished, "evaluating", label
