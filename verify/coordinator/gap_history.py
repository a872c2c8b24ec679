"""Whether a worker's gaps, over all that it handed in, are still those of rounding.

Weights a little off, or a temperature, may hide in one submission and not in a hundred. A verdict
says what the gaps of each rollout come to; the coordinator alone sees what all validators found and
adds up by how much they exceed what a calibrated pool's may be for ever (`verify.gap_noise`). A
submission that takes the sum beyond its limit is rejected, as are those after it until it falls.
"""

from __future__ import annotations

from collections.abc import Sequence

from verify.coordinator.reputation import WORKERS_GAPS
from verify.coordinator.state import Worker
from verify.formats.verdict import RolloutVerdict
from verify.gap_noise import GapNoise


def excess_of(rows: Sequence[RolloutVerdict], noise: GapNoise | None) -> float | None:
    """Of a submission, nats; None where its pool was not calibrated or nothing was recomputed."""
    counted = [(row.counted_gap, row.length) for row in rows if row.counted_gap is not None]
    if noise is None or not counted:
        return None
    return noise.excess(sum(gap for gap, _ in counted), sum(length for _, length in counted))


def fault(worker: Worker, excess: float | None, noise: GapNoise | None) -> str:
    """Why a worker's next submission is rejected, accepted as it is by itself; empty where not."""
    if excess is None or noise is None:
        return ""
    total = worker.gap_excess + excess
    if total <= noise.largest_excess:
        return ""
    return (
        f"{WORKERS_GAPS}: the gaps of its submissions together are more than rounding explains "
        f"(excess {total:.4g} nats, limit {noise.largest_excess:.4g})"
    )


def is_fault(reason: str) -> bool:
    """Whether a rejection is for `fault`."""
    return reason.startswith(f"{WORKERS_GAPS}: ")
