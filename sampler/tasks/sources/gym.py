"""Problems that reasoning-gym generates."""

from __future__ import annotations

import reasoning_gym

from runspec.core.canonical import hash_parts
from runspec.core.errors import UserError
from runspec.core.schema import Source
from sampler.tasks.interfaces import Keep
from verify.plugins import Problem

TASK_TYPE = "reasoning_gym"
ATTEMPTS = 1000
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
            self._dataset = reasoning_gym.create_dataset(
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
