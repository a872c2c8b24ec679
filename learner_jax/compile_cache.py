"""Compiled programs are kept, so that a restart need not compile again.

JAX keys an entry by the program, the compiler's version and flags, and the device; what it cannot
read it compiles anew. It has no digest of what it reads, and a program with a flipped bit ends the
process. So the digests are kept beside the programs, and what does not agree is removed at the next
start. On a GPU the autotuner's choices are kept there too: a repeatable result needs those as well.
"""

from __future__ import annotations

import logging
from pathlib import Path

import jax

from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.hashing import digest_file
from runspec.core.spec.schema import RunSpec

DIGESTS_NAME = "digests.json"
_MAX_DIGESTS_BYTES = 4 * 1024 * 1024
_PROGRAMS = "*-cache"  # as JAX names its entries
_LOG = logging.getLogger(__name__)
_REQUESTS = "/jax/compilation_cache/compile_requests_use_cache"
_HITS = "/jax/compilation_cache/cache_hits"
_COMPILE_S = "/jax/core/compile/backend_compile_duration"


def cache_folder(run_dir: Path, spec: RunSpec) -> Path:
    """`learner.compile_cache`, or `compiled` in the run directory."""
    chosen = spec.learner.compile_cache
    return run_dir / "compiled" if chosen is None else Path(chosen)


def keep_compiled(folder: Path) -> None:
    """Keeps this process's compiled programs in `folder`; removes those there that are damaged.

    Raises:
        UserError: it cannot be made or cleaned.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_unknown(folder)
    except OSError as error:
        raise UserError(
            f"no folder for compiled programs: {error.strerror}",
            place=str(folder),
            remedy="mend the permissions, or name another one: learner.compile_cache",
        ) from error
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs too: a run has dozens, and restarts are what this is for.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    logging.captureWarnings(True)  # what JAX cannot read is a line in the log


def note_compiled(folder: Path) -> None:
    """Notes the digests of the programs in `folder`: the next start takes no others."""
    if folder.is_dir() and jax.process_index() == 0:  # which alone writes programs
        digests = {path.name: digest_file(path) for path in sorted(folder.glob(_PROGRAMS))}
        write_atomic(folder / DIGESTS_NAME, canonical_json(digests))


def _remove_unknown(folder: Path) -> None:
    try:
        data = read_bounded(folder / DIGESTS_NAME, _MAX_DIGESTS_BYTES)
        noted = parse_object(data, max_bytes=_MAX_DIGESTS_BYTES)
    except FileNotFoundError:
        noted = {}
    except (MalformedJson, UserError) as error:
        _LOG.warning("%s: compiling everything: %s", folder / DIGESTS_NAME, error)
        noted = {}
    for path in folder.glob(_PROGRAMS):
        # Another process that shares the folder may be quicker.
        if noted.get(path.name) != _digest_if_there(path):
            damaged = "damaged" if path.name in noted else "from a start that was cut short"
            _LOG.warning("%s: %s, compiling it again", path, damaged)
            path.unlink(missing_ok=True)


def _digest_if_there(path: Path) -> str | None:
    try:
        return digest_file(path)
    except FileNotFoundError:
        return None


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
