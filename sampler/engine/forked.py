"""Engine cores of CPUs are forked from a server that has vLLM imported.

The import takes ten seconds of a processor, and a core that is spawned begins with it. The fork
server of `multiprocessing` imports vLLM beside the worker's own import, and a core that has died is
there again in the time that its weights take. On GPUs cores are spawned.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import context, current_process, forkserver, popen_forkserver
from multiprocessing.connection import wait
from pathlib import Path

from sampler.engine.guard import Guarded, in_vllm
from sampler.engine.sockets import SocketFolder

_LIBRARIES = (
    ("vllm", "libs/libtcmalloc*.so*"),
    ("torch", "../torch.libs/libgomp*.so*"),
    ("torch", "lib/libgomp*.so*"),
)
"""Libraries that vLLM preloads in a core of CPUs: package, and pattern in it."""


class _Handle(popen_forkserver.Popen):
    """Takes questions of several threads: the exit code arrives once, through a pipe."""

    _lock = threading.Lock()

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if flag != os.WNOHANG and self.returncode is None:
            wait([self.sentinel])
        with self._lock:
            return super().poll()


class _Process(Guarded, context.ForkServerProcess):
    """Has the environment variables of the process that starts it, as a spawned one has."""

    variables: dict[str, str]

    @staticmethod
    def _Popen(process: _Process) -> _Handle:  # type: ignore[override]
        process.variables = dict(os.environ)
        return _Handle(process)

    def run(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server hears none
        os.environ.clear()
        os.environ.update(self.variables)
        super().run()


class Forked(context.ForkServerContext):
    """The context of `multiprocessing` whose processes have imported what the server has."""

    Process = _Process


CONTEXT = Forked()
FORKED = in_vllm(CONTEXT)
"""vLLM's own setting takes no way to start processes but spawning and forking the worker, which has
threads."""


def serve(preload: str = "sampler.engine.preload") -> None:
    """Starts the server, unless it runs; it ends with this process.

    Args:
        preload: the module that it imports.
    """
    current_process()._config["tempdir"] = str(_folder().path)  # type: ignore[attr-defined]
    forkserver.set_forkserver_preload([preload])
    with _libraries_first():
        forkserver.ensure_running()


@functools.cache
def _folder() -> SocketFolder:
    """Of the server's socket."""
    return SocketFolder()


@contextmanager
def _libraries_first() -> Iterator[None]:
    """Processes that start inside the block preload the libraries that vLLM's cores preload."""
    before = os.environ.get("LD_PRELOAD")
    found = [path for package, pattern in _LIBRARIES for path in _find(package, pattern)]
    os.environ["LD_PRELOAD"] = ":".join([*found, before] if before else found)
    try:
        yield
    finally:
        del os.environ["LD_PRELOAD"]
        if before is not None:
            os.environ["LD_PRELOAD"] = before


def _find(package: str, pattern: str) -> list[str]:
    """The first file in the folder of a package, which is not imported."""
    spec = find_spec(package)
    folders = (spec.submodule_search_locations or []) if spec else []
    return [str(path) for folder in folders for path in sorted(Path(folder).glob(pattern))][:1]
