"""Whether rounding explains the gaps of all submissions of a worker together.

Slightly different weights, or another temperature, may hide in one submission and not in a hundred.
A verdict tells the gaps of each rollout. Only the coordinator sees all verdicts, and adds up by how
much the gaps exceed what they may be in the long run in a calibrated pool (`verify.thresholds`). A
submission that takes the sum beyond its limit is rejected. The sum then stays at the limit, so that
a later submission that lowers it is accepted. A sum belongs to one calibration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from verify.coordinator.machine.reputation import WORKERS_GAPS
from verify.coordinator.machine.state import Worker
from verify.thresholds import GapNoise

if TYPE_CHECKING:  # the state machine is read by commands that need no arrays
    from verify.formats.verdict import RolloutVerdict


class AnotherCalibration(ValueError):
    """A verdict whose validator judges by another spec than the coordinator's."""


def excess_of(rows: Sequence[RolloutVerdict], noise: GapNoise | None) -> float | None:
    """Return the excess of a submission, nats; None if not calibrated or not recomputed.

    Raises:
        AnotherCalibration: a row was recomputed, and says nothing of its gaps.
    """
    if noise is None:
        return None
    recomputed = [row.gap_excess for row in rows if row.logprob_diff is not None]
    found = [excess for excess in recomputed if excess is not None]
    if len(found) < len(recomputed):
        raise AnotherCalibration(
            "nothing is said of the gaps of a calibrated pool: the validator has another spec"
        )
    return sum(found) if found else None


def fault(worker: Worker, excess: float | None, noise: GapNoise | None) -> str:
    """Return why a submission that is accepted by itself is rejected; empty if it is not."""
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
    """Return the worker after a submission, accepted or not."""
    if excess is None or noise is None:
        return worker
    total = min(max(0.0, _sum(worker, noise) + excess), noise.largest_excess)
    return replace(worker, gap_excess=total, gap_noise=noise)


def is_fault(reason: str) -> bool:
    """Whether a rejection is for `fault`."""
    return reason.startswith(f"{WORKERS_GAPS}: ")


def _sum(worker: Worker, noise: GapNoise) -> float:
    return worker.gap_excess if worker.gap_noise == noise else 0.0
