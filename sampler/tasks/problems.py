"""Problems of a run: the problems of its sources that are in the split and whose prompts fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from runspec.core.hashing import hash_parts
from runspec.core.spec.schema import RunSpec
from runspec.core.spec.source_files import redirected
from sampler.tasks.interfaces import Keep, Part, ProblemSource, make_source
from sampler.tasks.prompts import PromptCodec
from verify.plugins import Problem, Split

_HELD_OUT_ONE_IN = 10
_CACHED_PROBLEMS = 256


def split_of(problem: str) -> Split:
    """Return the split of a problem: a tenth, by a hash of the text, is held out from training.

    Case is ignored, because a tokenizer may map `Lent` and `lent` to the same tokens.
    """
    word = int.from_bytes(hash_parts("split", problem.lower())[:8], "big")
    return "held_out" if word % _HELD_OUT_ONE_IN == 0 else "train"


def target_lengths(spec: RunSpec) -> list[int]:
    """Return the lengths that prompts of the run ask for, in tokens."""
    return [target for reward in spec.reward for target in reward.targets or []]


class InSplit(Keep):
    """Accepts the problems of a split, of any length."""

    known = ("train", "held_out")

    def __init__(self, split: Split) -> None:
        self.wanted = split
        self.digest = hash_parts("keep", split).hex()

    def parts(self, problems: Sequence[str]) -> list[Part]:
        """Return the split of each problem."""
        return [split_of(problem) for problem in problems]


class Fitting(Keep):
    """Accepts the problems of a split whose prompts fit with every target length.

    Args:
        codec: renders and encodes prompts.
        targets: lengths that prompts may ask for; empty if they ask for none.
        limit: longest prompt, in tokens.
        split: None accepts both splits.
    """

    def __init__(
        self, codec: PromptCodec, targets: Sequence[int], limit: int, split: Split | None
    ) -> None:
        self._codec = codec
        self._targets: list[int | None] = [*targets] or [None]
        self._limit = limit
        self._split = split
        self.wanted = split or "train"
        parts = ("keep", split or "", limit, codec.digest, *targets)
        self.digest = hash_parts(*parts).hex()
        """Digest of everything that the answers depend on."""

    def parts(self, problems: Sequence[str]) -> list[Part]:
        """Return the part of each problem; encodes one batch for each target."""
        found: list[Part] = [split_of(text) if self._split else "train" for text in problems]
        for target in self._targets:
            left = [i for i, part in enumerate(found) if part != "over_long"]
            lengths = self._codec.prompt_lengths([problems[i] for i in left], target)
            for i, length in zip(left, lengths, strict=True):
                if length > self._limit:
                    found[i] = "over_long"
        return found


def problem_filter(spec: RunSpec, codec: PromptCodec, split: Split | None) -> Fitting:
    """Return the filter for problems of a split (None: of both) whose prompts fit.

    In a run that holds none out, both splits are all problems.
    """
    of_split = split if spec.holds_out else None
    return Fitting(codec, target_lengths(spec), spec.data.max_prompt_tokens, of_split)


class Problems:
    """The problems of some sources under one index, those of the first source first.

    Args:
        spec: names the sources.
        keep: decides which problems belong to the run.
        data_dir: holds the files of all sources; None if they are at their `uri`.
        only: name of the one source to take; None: all that the run trains on.
        task_type: that of all problems; None: as their sources say.
    """

    def __init__(
        self,
        spec: RunSpec,
        keep: Keep,
        data_dir: Path | None = None,
        *,
        only: str | None = None,
        task_type: str | None = None,
    ) -> None:
        self._sources: list[ProblemSource] = [
            make_source(redirected(source, data_dir), spec.seed, keep)
            for source in spec.data.sources
            if (source.train if only is None else source.name == only)
        ]
        self._ends = list(accumulate(len(source) for source in self._sources))
        types = [source.task_types for source in self._sources]
        self.task_types = frozenset().union(*types if task_type is None else [{task_type}])
        self._task_type = task_type
        self.problem = lru_cache(_CACHED_PROBLEMS)(self._problem)

    def __len__(self) -> int:
        return self._ends[-1]

    def _problem(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index} of {len(self)}")
        which = bisect_right(self._ends, index)
        start = self._ends[which - 1] if which else 0
        found = self._sources[which].problem(index - start)
        return found if self._task_type is None else replace(found, task_type=self._task_type)
