"""Latencies of submissions: until their verdict, and until the batch manifest that trains them.

They are folded from the ledger's events like the state, so they survive a restart.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from verify.coordinator.machine import events

RECENT = 1000
"""Submissions in the `recent` percentiles."""
BUCKETS_S = (1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 7200.0)
"""Upper ends of the Prometheus buckets, in seconds."""
_RATE_OVER = 64
"""Number of verdicts over which the rate is measured."""
_LEAST_SPAN_S = 1.0
"""Least number of seconds over which a rate is measured."""


class Durations:
    """All measured durations in seconds, eight bytes each, so that percentiles are exact."""

    def __init__(self) -> None:
        self._all = array("d")

    def add(self, seconds: float) -> None:
        self._all.append(max(0.0, seconds))  # a clock may be set back

    def report(self) -> dict[str, Any]:
        """Return percentiles of the last `RECENT` durations and of the whole run."""
        return {"recent": percentiles(self._all[-RECENT:]), "run": percentiles(self._all)}

    def histogram(self) -> tuple[list[tuple[str, float]], float]:
        """Return cumulative counts by bucket, in Prometheus' form, and the sum of all durations."""
        values = np.sort(np.asarray(self._all))
        counts = np.searchsorted(values, BUCKETS_S, side="right")
        buckets = [(str(end), float(n)) for end, n in zip(BUCKETS_S, counts, strict=True)]
        return [*buckets, ("+Inf", float(len(values)))], float(values.sum())


class History:
    """Latencies and rates of submissions; `take` receives every event of the ledger, in order."""

    def __init__(self) -> None:
        self.to_verdict, self.to_manifest = Durations(), Durations()
        self._bytes: dict[str, int] = {}
        """Sizes of the submissions without a verdict, by lease."""
        self._untrained: dict[str, float] = {}
        """Arrival of each submission, by lease, until a manifest names it."""
        self._since_batch: list[float] = []
        self._verdicts: deque[float] = deque(maxlen=_RATE_OVER)
        self._opened: dict[int, float] = {}
        """Opening times of the open steps."""
        self._accepted: deque[tuple[float, int]] = deque()
        """Time and accepted output tokens of each verdict since the oldest open step opened."""

    def take(self, event: events.Event, remembered: Iterable[str]) -> None:
        """Record an event.

        Args:
            event: the newest event.
            remembered: leases that the state after it still has.
        """
        match event:
            case events.NonceDrawn():
                self._opened.setdefault(event.step, event.at)
            case events.SubmissionReceived():
                self._bytes[event.lease] = event.bytes
                self._untrained[event.lease] = event.at
            case events.SubmissionJudged():
                self._bytes.pop(event.lease, None)
                self._verdicts.append(event.at)
                took = event.at - self._untrained[event.lease]
                self._since_batch.append(took)
                self.to_verdict.add(took)
                tokens = sum(g.tokens for g in event.groups if g.outcome != "dropped")
                self._accepted.append((event.at, tokens))
                if not event.accepted:
                    del self._untrained[event.lease]
            case events.SubmissionSetAside():
                self._bytes.pop(event.lease, None)
                del self._untrained[event.lease]
            case events.StepClosed():
                for took in self._trained(event.at, event.trained):
                    self.to_manifest.add(took)
                kept = set(remembered) - {group.lease for group in event.trained}
                self._untrained = {le: at for le, at in self._untrained.items() if le in kept}
                self._since_batch = []
                self._opened.pop(event.step, None)
                oldest = min(self._opened.values(), default=event.at)
                while self._accepted and self._accepted[0][0] < oldest:
                    self._accepted.popleft()
            case events.RolledBack():
                self._bytes, self._untrained, self._since_batch = {}, {}, []
                self._opened, self._accepted = {}, deque()

    def bytes_of(self, lease: str) -> int:
        """Return the bytes of a submission that waits for its verdict."""
        return self._bytes.get(lease, 0)

    def verdicts_per_s(self, now: float) -> float:
        """Return the rate of the last verdicts; it falls while none arrives. 0 before the first."""
        if not self._verdicts:
            return 0.0
        return len(self._verdicts) / max(now - self._verdicts[0], _LEAST_SPAN_S)

    def batch_stats(
        self, now: float, step: int, trained: Iterable[events.TrainedGroup]
    ) -> dict[str, Any]:
        """Return the part of a batch manifest's `stats` that the history gives.

        Args:
            now: seconds since the epoch, when the step closes.
            step: number of the step.
            trained: groups of the batch.

        Returns:
            Latencies in seconds, None without submissions; accepted output tokens a second while
            the step was open, None if it was open for no time.
        """
        verdict = percentiles(self._since_batch)
        manifest = percentiles(self._trained(now, trained))
        return {
            "verdict_latency_p50": verdict["p50"],
            "verdict_latency_p99": verdict["p99"],
            "manifest_latency_p50": manifest["p50"],
            "manifest_latency_p99": manifest["p99"],
            "accepted_tokens_per_s": self._accepted_per_s(now, step),
        }

    def _accepted_per_s(self, now: float, step: int) -> float | None:
        opened = self._opened.get(step)
        if opened is None or now <= opened:
            return None
        return sum(tokens for at, tokens in self._accepted if at > opened) / (now - opened)

    def _trained(self, now: float, trained: Iterable[events.TrainedGroup]) -> list[float]:
        """Return how long each submission waited for the first manifest that names it, seconds."""
        leases = dict.fromkeys(group.lease for group in trained)
        return [now - self._untrained[lease] for lease in leases if lease in self._untrained]


def percentiles(values: array[float] | list[float]) -> dict[str, Any]:
    """Return count, median and 99th percentile in seconds; None for the latter of no values."""
    if not len(values):
        return {"count": 0, "p50": None, "p99": None}
    p50, p99 = np.percentile(np.asarray(values), [50, 99])
    return {"count": len(values), "p50": round(float(p50), 3), "p99": round(float(p99), 3)}
