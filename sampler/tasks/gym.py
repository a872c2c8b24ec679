"""Problems that reasoning-gym generates, and its own scorers, made binary.

reasoning-gym is imported when a problem is made or scored: it takes seconds, and few processes need
it.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from runspec.core.canonical import hash_parts
from runspec.core.errors import UserError
from runspec.core.schema import Source
from sampler.tasks.interfaces import Keep, TaskTerm
from verify.plugins import Problem

TASK_TYPE = "reasoning_gym"
ATTEMPTS = 1000
_KEPT_DATASETS = 64
REFUSED = frozenset(
    {
        "binary_matrix",
        "composite",
        "countdown",
        "intermediate_integration",
        "n_queens",
        "polynomial_multiplication",
        "puzzle24",
        "simple_integration",
        "spiral_matrix",
        "string_insertion",
    }
)
"""Generators whose scorers hand the answer to `eval` or to sympy's parser, which is `eval` too: a
model's output would run as code in the validator. `composite` can contain any of them."""


class GymSource:
    """Source around a generator of reasoning-gym; a problem is generated when it is requested.

    A problem that `keep` refuses is replaced by one at an index hashed from (seed, i, attempt).

    Raises:
        UserError: no such generator, one whose scorer evaluates answers as code, or one that
            refuses its parameters.
    """

    task_types = frozenset({TASK_TYPE})

    def __init__(self, source: Source, seed: int, keep: Keep) -> None:
        self._name = source.name
        self._size = source.size or 0
        self._keep = keep
        self._seed = int.from_bytes(hash_parts("source", seed, source.name)[:4], "big")
        self._made_by = {
            "dataset": source.dataset,
            "params": source.params,
            "seed": self._seed,
            "size": self._size,
        }
        place = f"data.sources.{source.name}"
        if source.dataset is None or not self._size:
            raise UserError("kind reasoning_gym needs dataset and size", place=place)
        if source.dataset in REFUSED:
            raise UserError(
                f"the scorer of {source.dataset!r} evaluates answers as code",
                place=place,
                remedy="choose another generator",
            )
        try:
            self._dataset = importlib.import_module("reasoning_gym").create_dataset(
                source.dataset, seed=self._seed, size=self._size, **source.params
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise UserError(
                f"reasoning-gym refuses {source.dataset!r} with {source.params}: {error}",
                place=place,
                remedy="see the generator's parameters in reasoning-gym's gallery",
            ) from error

    def __len__(self) -> int:
        return self._size

    def problem(self, index: int) -> Problem:
        """Return the problem at an index.

        Raises:
            UserError: `keep` refused a thousand candidates.
        """
        candidate = index
        for attempt in range(ATTEMPTS):
            entry = self._dataset[candidate]
            if self._keep(entry["question"]):
                return Problem(
                    problem_id=f"{self._name}-{index}",
                    task_type=TASK_TYPE,
                    prompt=entry["question"],
                    verification={**self._made_by, "index": candidate, "answer": entry["answer"]},
                )
            word = hash_parts("replacement", self._seed, index, attempt)[:8]
            candidate = int.from_bytes(word, "big") % self._size
        raise UserError(
            f"none of {ATTEMPTS} problems fits the prompt limit and the split",
            place=f"data.sources.{self._name}",
            remedy="raise data.max_prompt_tokens or the source's size",
        )


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
    if name in REFUSED:
        raise ValueError(f"the scorer of {name!r} evaluates answers as code")
    gym = importlib.import_module("reasoning_gym")
    return gym.create_dataset(name, seed=seed, size=size, **json.loads(params))
