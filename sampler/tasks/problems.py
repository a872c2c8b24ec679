"""The problems of all sources under one index."""

from __future__ import annotations

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from runspec.core.spec.schema import RunSpec
from runspec.core.spec.source_files import redirected
from sampler.tasks.interfaces import Keep, ProblemSource, make_source
from verify.plugins import Problem

_CACHED_PROBLEMS = 256


class Problems:
    """The problems of all sources under one index, those of the first source first.

    Args:
        spec: names the sources.
        keep: which problems belong to the run.
        data_dir: holds the files of all sources; null: they lie where `uri` says.
    """

    def __init__(self, spec: RunSpec, keep: Keep, data_dir: Path | None = None) -> None:
        self._sources: list[ProblemSource] = [
            make_source(redirected(source, data_dir), spec.seed, keep)
            for source in spec.data.sources
        ]
        self._ends = list(accumulate(len(source) for source in self._sources))
        self.task_types = frozenset().union(*(source.task_types for source in self._sources))
        self.problem = lru_cache(_CACHED_PROBLEMS)(self._problem)

    def __len__(self) -> int:
        return self._ends[-1]

    def _problem(self, index: int) -> Problem:
        if not 0 <= index < len(self):
            raise IndexError(f"problem {index} of {len(self)}")
        which = bisect_right(self._ends, index)
        start = self._ends[which - 1] if which else 0
        return self._sources[which].problem(index - start)
