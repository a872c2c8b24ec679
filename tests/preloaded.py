"""Processes that have vLLM imported when they start.

vLLM's import takes ten seconds of a core. A fork server of `multiprocessing` imports it once for a
process of tests. vLLM's engine processes and their ranks are forked from it, and so are programs
that `Program` starts. The product itself spawns them: `orphan_maker` and whole runs show that.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import context, forkserver, popen_forkserver
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace

import pytest

SAMPLER = "import runpy; runpy.run_module('sampler', run_name='__main__', alter_sys=True)"
"""Code of `python -m sampler`."""


class _Handle(popen_forkserver.Popen):
    """Takes questions of several threads: the exit code arrives once, through a pipe."""

    _lock = threading.Lock()

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if flag != os.WNOHANG and self.returncode is None:
            wait([self.sentinel])
        with self._lock:
            return super().poll()


class _Process(context.ForkServerProcess):
    """Has the environment variables of the process that starts it, as a spawned one has."""

    @staticmethod
    def _Popen(process: _Process) -> _Handle:  # type: ignore[override]
        process.variables = dict(os.environ)
        return _Handle(process)

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.variables)
        super().run()


class Preloaded(context.ForkServerContext):
    """The context of `multiprocessing` whose processes have vLLM imported."""

    Process = _Process


CONTEXT = Preloaded()
IN_VLLM = SimpleNamespace(get_context=lambda method: CONTEXT)
"""What `vllm.utils.system_utils` has for the module `multiprocessing`."""


def serve() -> None:
    """Starts the server; it ends with this process."""
    forkserver.set_forkserver_preload(["tests.preloads"])
    forkserver.ensure_running()


@contextmanager
def engines_forked() -> Iterator[None]:
    """Engines that start inside the block fork their processes from the server; tensor-parallel
    ranks have a core each."""
    from sampler.engine.arguments import prepare_environment

    prepare_environment()
    with pytest.MonkeyPatch.context() as patch:
        cores = sorted(os.sched_getaffinity(0))
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, cores[:2])))
        patch.setattr("vllm.utils.system_utils.multiprocessing", IN_VLLM)
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
