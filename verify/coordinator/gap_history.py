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


def excess_of(rows: Sequence[RolloutVerdict]) -> float | None:
    """Of a submission, nats; None where its pool was not calibrated or nothing was recomputed."""
    found = [row.gap_excess for row in rows if row.gap_excess is not None]
    return sum(found) if found else None


def fault(worker: Worker, excess: float | None, limit: float | None) -> str:
    """Why a worker's next submission is rejected, accepted as it is by itself; empty where not.

    Args:
        worker: before it.
        excess: of the submission.
        limit: of its pool (`GapNoise.largest_excess`), nats; None where that was not calibrated.
    """
    if excess is None or limit is None or worker.gap_excess + excess <= limit:
        return ""
    return (
        f"{WORKERS_GAPS}: the gaps of its submissions together are more than rounding explains "
        f"(excess {worker.gap_excess + excess:.4g} nats, limit {limit:.4g})"
    )


def is_fault(reason: str) -> bool:
    """Whether a rejection is for `fault`."""
    return reason.startswith(f"{WORKERS_GAPS}: ")
