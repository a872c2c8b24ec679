"""Whether the samplers' log-probs are the learner's, on the same tokens under the same version.

A worker claims log-probs as its engine computed them; a validator recomputes them with the
learner's own model from the published bits of the version that sampled. Validators reject what is
far off; what drifts within their limits would bias every importance ratio, and shows here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from runspec.core.spec.schema import RunSpec
from verify.thresholds import LOGPROB_ALARM, precision_of


@dataclass(frozen=True)
class Agreement:
    """|claimed - recomputed| log-prob over the output tokens of a step that were recomputed."""

    tokens: int
    mean: float
    """Nats."""
    largest: float


def agreement(pairs: Iterable[tuple[np.ndarray, np.ndarray]]) -> Agreement | None:
    """Compares log-probs.

    Args:
        pairs: of each rollout the claimed and the recomputed ones, f32 [n] each.

    Returns:
        None where nothing was recomputed.
    """
    differences = [np.abs(claimed.astype(np.float64) - ours) for claimed, ours in pairs]
    if not differences:
        return None
    every = np.concatenate(differences)
    return Agreement(len(every), float(every.mean()), float(every.max()))


def alarm_limit(spec: RunSpec) -> float:
    """The mean above which a step raises the alarm: `verify.logprob_alarm`, or that of the coarsest
    precision among the pools."""
    if spec.verify.logprob_alarm is not None:
        return spec.verify.logprob_alarm
    return max(LOGPROB_ALARM[precision_of(pool)] for pool in spec.samplers)
