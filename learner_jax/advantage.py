"""Advantages of a group of rollouts."""

from __future__ import annotations

from typing import Literal

import numpy as np

EPS = 1e-6
_EPS_F32 = 2.0**-23


def group_advantages(
    task_reward: np.ndarray,
    length_penalty: np.ndarray,
    reward: np.ndarray,
    *,
    normalize: Literal["std", "task", "none"],
) -> np.ndarray:
    """Advantages inside each group; R reward, T task reward, P length term, std with ddof 1.

        std    (R - mean R) / (std R + 1e-6)
        none   R - mean R
        task   (T - mean T) / (std T + 1e-6) + (P - mean P), where R = T + P: the length keeps its
               scale, and noise in it is never divided up to unit advantages

    `std` is GRPO's (arXiv 2402.03300, section 4.1.1), `none` that of arXiv 2503.20783.

    Args:
        task_reward, length_penalty, reward: [..., group size].
        normalize: as above.

    Returns:
        float64 of the same shape; the mean over each group is 0.

    Raises:
        ValueError: a group of one, whose std is undefined; or `task` where R is not T + P.
    """
    reward, task_reward, length_penalty = (
        np.asarray(x, np.float64) for x in (reward, task_reward, length_penalty)
    )
    if reward.shape[-1] < 2:
        raise ValueError("a group needs at least two rollouts to have an advantage")
    if normalize == "none":
        return _centred(reward)
    if normalize == "std":
        return _standardised(reward)
    # Verdict files round each to float32 by itself.
    rounding = _EPS_F32 * (abs(reward) + abs(task_reward) + abs(length_penalty))
    if not (abs(reward - task_reward - length_penalty) <= 1e-5 + rounding).all():
        raise ValueError("`task` advantages need rewards that are task reward + length term")
    return _standardised(task_reward) + _centred(length_penalty)


def _centred(x: np.ndarray) -> np.ndarray:
    return x - x.mean(axis=-1, keepdims=True)


def _standardised(x: np.ndarray) -> np.ndarray:
    return _centred(x) / (x.std(axis=-1, ddof=1, keepdims=True) + EPS)
