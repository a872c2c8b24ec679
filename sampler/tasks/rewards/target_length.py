"""Length term: the prompt asks for a target length, and the reward depends on the difference."""

from __future__ import annotations

from runspec.core.errors import UserError
from runspec.core.schema import Reward
from sampler.tasks.interfaces import LengthTerm


class TargetLengthReward(LengthTerm):
    """P of R = T + P by `form`, with T the task reward and l the output's length in tokens:

    - `exact`: R = T - alpha |target - l| (INTELLECT-2, section 3.1.2);
    - `max`: R = T clip(alpha (target - l) + 0.5, 0, 1) (arXiv 2503.04697);
    - `clip`: R = T if l <= target else 0.

    Raises:
        UserError: no form, or no alpha where the form needs one.
    """

    def __init__(self, reward: Reward) -> None:
        if reward.form is None or (reward.alpha is None and reward.form != "clip"):
            raise UserError(
                "kind target_length needs form and alpha", place=f"reward.{reward.name}"
            )
        self._form = reward.form
        self._alpha = reward.alpha or 0.0

    def penalty(self, task_reward: float, target: int, length: int) -> float:
        """Return P in units of reward; `target` and `length` are in tokens."""
        if self._form == "exact":
            return -self._alpha * abs(target - length)
        if self._form == "max":
            factor = min(max(self._alpha * (target - length) + 0.5, 0.0), 1.0)
        else:
            factor = 1.0 if length <= target else 0.0
        return task_reward * (factor - 1.0)
