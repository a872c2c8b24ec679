"""Compiled programs are kept, so that a restart need not compile again.

JAX keys an entry by the program, the compiler's version and flags, and the device; what it cannot
read it compiles anew, with a warning. On a GPU the autotuner's choices are kept beside them: a
repeatable result needs those as well.
"""

from __future__ import annotations

import logging
from pathlib import Path

import jax

from runspec.common.errors import UserError
from runspec.spec.schema import RunSpec

_REQUESTS = "/jax/compilation_cache/compile_requests_use_cache"
_HITS = "/jax/compilation_cache/cache_hits"
_COMPILE_S = "/jax/core/compile/backend_compile_duration"


def cache_folder(run_dir: Path, spec: RunSpec) -> Path:
    """`learner.compile_cache`, or `compiled` in the run directory."""
    chosen = spec.learner.compile_cache
    return run_dir / "compiled" if chosen is None else Path(chosen)


def keep_compiled(folder: Path) -> None:
    """Keeps this process's compiled programs in `folder`.

    Raises:
        UserError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"no folder for compiled programs: {error.strerror}",
            place=str(folder),
            remedy="mend the permissions, or name another one: learner.compile_cache",
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs too: a run has dozens, and restarts are what this is for.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    logging.captureWarnings(True)  # a damaged entry is a line in the log


class CompileCounter:
    """Counts the programs that this process compiles from now on; `str` tells of them."""

    def __init__(self) -> None:
        self.requests = self.hits = 0
        self.seconds = 0.0
        jax.monitoring.register_event_listener(self._event)
        jax.monitoring.register_event_duration_secs_listener(self._duration)

    def __str__(self) -> str:
        return (
            f"compiled in {self.seconds:.1f} s, {self.hits} of {self.requests} programs from the "
            "cache"
        )

    def _event(self, event: str, **_: str | int) -> None:
        self.requests += event == _REQUESTS
        self.hits += event == _HITS

    def _duration(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_S:
            self.seconds += duration_secs
