"""reasoning-gym's own scorers, made binary."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sampler.tasks.interfaces import TaskTerm
from verify.plugins import Problem

_KEPT_DATASETS = 64


class GymReward(TaskTerm):
    """Scorer of the problem's own generator, made binary: full credit or none.

    Partial credit would reward guesses, for example a word that ends in the right letters. The
    verification names the generator (`dataset`, `params`, `seed`, `size`) and the problem's
    `index`; the problem is made again from them.
    """

    def prepare(self) -> None:
        """Import reasoning-gym."""
        importlib.import_module("reasoning_gym")

    def score(self, problem: Problem, answer: str) -> float:
        """Return 1.0 for the generator's full credit, else 0.0; a value that is no number is
        returned for the caller to refuse.

        Full credit is exactly 1. Scorers that add up shares reach 1.0000000000000002 for a long
        answer of which only the start is right.

        Raises:
            ValueError: the verification names none of the generators that may score.
        """
        *generator, index = origin_of(problem.verification)
        dataset = _dataset(*generator)
        score = float(dataset.score_answer(answer, dataset[index]))
        return float(score == 1.0) if math.isfinite(score) else score


def origin_of(verification: Mapping[str, Any]) -> tuple[str, str, int, int, int]:
    """Return what a problem is made from: generator, its parameters as JSON, seed, size and index.

    Raises:
        ValueError: they are not all there, or one has another type.
    """
    try:
        dataset, params = verification["dataset"], json.dumps({**verification["params"]})
        seed, size, index = (int(verification[name]) for name in ("seed", "size", "index"))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"verification_info names no generated problem: {error!r}") from error
    return str(dataset), params, seed, size, index


@lru_cache(_KEPT_DATASETS)
def _dataset(name: str, params: str, seed: int, size: int) -> Any:
    import reasoning_gym  # takes seconds, and only graders need it

    from sampler.tasks.sources.gym import REFUSED

    if name in REFUSED:
        raise ValueError(f"the scorer of {name!r} evaluates answers as code")
    return reasoning_gym.create_dataset(name, seed=seed, size=size, **json.loads(params))
