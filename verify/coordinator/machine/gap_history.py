"""Whether rounding explains the gaps of all submissions of a worker together.

One submission may be too small to show slightly different weights or another temperature; a
hundred submissions show them. A verdict reports the gaps of each rollout. Only the coordinator sees
all verdicts. It sums by how much the gaps of a calibrated pool exceed their long-run budget
(`verify.thresholds`). A submission that takes the sum above its limit is rejected. The sum then
stays at the limit, so that a later submission that lowers it is accepted. A sum belongs to one
calibration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from verify.coordinator.machine.reputation import WORKERS_GAPS
from verify.coordinator.machine.state import Worker
from verify.thresholds import GapNoise

if TYPE_CHECKING:  # commands that need no arrays import the state machine
    from verify.formats.verdict import RolloutVerdict


class AnotherCalibration(ValueError):
    """Raised for a verdict of a validator whose spec differs from the coordinator's."""


def excess_of(rows: Sequence[RolloutVerdict], noise: GapNoise | None) -> float | None:
    """Return the excess of a submission, nats; None if not calibrated or not recomputed.

    Raises:
        AnotherCalibration: a recomputed row has no gaps.
    """
    if noise is None:
        return None
    recomputed = [row.gap_excess for row in rows if row.logprob_diff is not None]
    found = [excess for excess in recomputed if excess is not None]
    if len(found) < len(recomputed):
        raise AnotherCalibration("no gaps for a calibrated pool: the validator has another spec")
    return sum(found) if found else None


def fault(worker: Worker, excess: float | None, noise: GapNoise | None) -> str:
    """Return why a submission is rejected by the gaps of its worker; empty if it is not."""
    if excess is None or noise is None:
        return ""
    total, limit = _sum(worker, noise) + excess, noise.largest_excess
    if total <= limit:
        return ""
    return (
        f"{WORKERS_GAPS}: the gaps of its submissions together are more than rounding explains "
        f"(excess {total:.4g} nats, limit {limit:.4g})"
    )


def with_gaps(worker: Worker, excess: float | None, noise: GapNoise | None) -> Worker:
    """Return the worker with the gaps of a submission, accepted or not."""
    if excess is None or noise is None:
        return worker
    total = min(max(0.0, _sum(worker, noise) + excess), noise.largest_excess)
    return replace(worker, gap_excess=total, gap_noise=noise)


def is_fault(reason: str) -> bool:
    """Whether a rejection is for `fault`."""
    return reason.startswith(f"{WORKERS_GAPS}: ")


def _sum(worker: Worker, noise: GapNoise) -> float:
    return worker.gap_excess if worker.gap_noise == noise else 0.0
