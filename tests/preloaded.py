"""Processes that have vLLM imported when they start.

vLLM's import takes ten seconds of a core. The server of `sampler.engine.processes` imports it once
for a process of tests. vLLM's engine processes are forked from it, and here their ranks and
programs that `Program` starts as well.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sampler.engine import processes
from sampler.engine.processes import CONTEXT, FORKED

ROLE = "import runpy; runpy.run_module('runspec.role', run_name='__main__', alter_sys=True)"
"""Code of `python -m runspec.role`."""


def serve() -> None:
    """Starts the server; it ends with this process."""
    processes.serve("tests.preloads")


@contextmanager
def engines_forked() -> Iterator[None]:
    """Engines that start inside the block fork their processes from the server; tensor-parallel
    ranks have a core each."""
    from sampler.engine.arguments import prepare_environment

    prepare_environment()
    with pytest.MonkeyPatch.context() as patch:
        cores = sorted(os.sched_getaffinity(0))
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, cores[:2])))
        patch.setattr("vllm.utils.system_utils.multiprocessing", FORKED)
        yield


class Program:
    """`python -c CODE ARGUMENTS` in a process that has vLLM imported; a part of Popen's methods.

    Args:
        code: the program.
        arguments: the rest of `sys.argv`.
        log: what it prints is appended here.
    """

    def __init__(self, code: str, *arguments: str | Path, log: Path) -> None:
        words = [str(argument) for argument in arguments]
        self._process = CONTEXT.Process(target=_execute, args=(code, words, log))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if (code := self._process.exitcode) is None:
            raise subprocess.TimeoutExpired("a preloaded program", timeout or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _execute(code: str, arguments: list[str], log: Path) -> None:
    with log.open("ab", buffering=0) as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    sys.argv = ["-c", *arguments]
    exec(code, {"__name__": "__main__"})
