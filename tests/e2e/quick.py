"""Runs that find what runs before them made: a warm start, and compiled programs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.harness import LiveRun


class QuickRun(LiveRun):
    """A LiveRun whose learner compiles into a folder beside its runs, where warm starts lie too."""

    @property
    def words(self) -> list[str]:
        folder = self.runs_dir.parent / ".cache" / "learner"
        return [*super().words, "--set", f"learner.compile_cache={folder}"]


@contextmanager
def programs_kept(folder: Path) -> Iterator[None]:
    """What is started inside the block keeps what JAX compiles in `folder`, a learner excepted.

    A validator, a publisher and a warm start compile anew whenever they start; of all that a run
    does before its first step, only the imports of vLLM take more.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(folder))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        yield
