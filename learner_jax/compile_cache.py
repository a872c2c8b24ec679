"""Cache of compiled programs, one for all runs of a user, so that a start need not compile again.

JAX keys an entry by the program, the compiler's version and flags, and the device; what it cannot
read it compiles anew. JAX's own files have no digest, and a program with a flipped bit ends the
process. So an entry here is the digest of a program and the program, written by one rename: runs
that share the folder see whole entries or none. On a GPU the autotuner's choices are kept in the
same folder: a repeatable result needs those as well.
"""

from __future__ import annotations

import logging
import os
import stat
import time
from contextlib import suppress
from pathlib import Path

import blake3
import jax
from jax._src import compilation_cache as private  # noqa: PLC2701 - see `keep_compiled`
from jax._src.compilation_cache_interface import CacheInterface  # noqa: PLC2701 - the same

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.schema import RunSpec

UNUSED_DAYS = 30
"""Days after its last use at which an entry is removed."""
_DIGEST_BYTES = 32
_SUFFIX = ".program"
_LOG = logging.getLogger(__name__)
_REQUESTS = "/jax/compilation_cache/compile_requests_use_cache"
_HITS = "/jax/compilation_cache/cache_hits"
_COMPILE_S = "/jax/core/compile/backend_compile_duration"


def cache_folder(spec: RunSpec) -> Path:
    """`learner.compile_cache`, or a folder of the user's own."""
    if spec.learner.compile_cache is not None:
        return Path(spec.learner.compile_cache)
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(caches).expanduser() / "runspec" / "compiled"


def keep_compiled(folder: Path) -> None:
    """Keeps this process's compiled programs in `folder`, and takes from there what is whole.

    Raises:
        UserError: the folder cannot be made, or others may write to it.
    """
    remedy = "mend the permissions, or name another one: learner.compile_cache"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        oldest = time.time() - UNUSED_DAYS * 86400
        for path in folder.glob(f"*{_SUFFIX}"):
            with suppress(FileNotFoundError):  # another process may be quicker
                if path.stat().st_mtime < oldest:
                    path.unlink()
    except OSError as error:
        raise UserError(
            f"no folder for compiled programs: {error.strerror}", place=str(folder), remedy=remedy
        ) from error
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        # Whoever writes an entry has this process run it.
        raise UserError("others may write compiled programs here", place=str(folder), remedy=remedy)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    # Small programs too: a run has dozens, and restarts are what this is for.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    private._cache = ProgramCache(folder)  # noqa: SLF001 - no public way to name another cache
    logging.captureWarnings(True)  # what JAX cannot read is a line in the log


class ProgramCache(CacheInterface):
    """Compiled programs in a folder, each with its digest.

    Args:
        folder: exists, and nobody else may write to it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder

    def get(self, key: str) -> bytes | None:
        """The program under a key; None where there is none, or a damaged one."""
        path = self._entry(key)
        try:
            data = path.read_bytes()
            os.utime(path)
        except FileNotFoundError:
            return None
        program = data[_DIGEST_BYTES:]
        if blake3.blake3(program).digest() == data[:_DIGEST_BYTES]:
            return program
        _LOG.warning("%s: damaged, compiling it again", path)
        path.unlink(missing_ok=True)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keeps a program under a key; of two processes that do, the last one's stays."""
        write_atomic(self._entry(key), blake3.blake3(value).digest() + value)

    def _entry(self, key: str) -> Path:
        return self._path / f"{key}{_SUFFIX}"


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
