"""How vLLM's processes start and end: their sockets, their end with the worker, the fork server.

- vLLM does not remove the sockets between its processes, so they get a folder that is removed. An
  engine core that does not start also writes the exception that ended it there, because vLLM
  reports to the worker only that it failed.
- vLLM's processes wait for messages for ever if the worker is killed (SIGKILL). Each of ours holds
  one end of a pipe whose other end closes with its parent. A thread waits for that, and starts
  before any code of vLLM runs.
- On CPUs engine cores are forked from a server that has vLLM imported. The import takes ten seconds
  of a core's CPU time, and a spawned engine core starts with it. The server itself is forked from
  the worker, once that has imported vLLM, or imports vLLM beside it. Replacing a dead core takes
  only as long as loading its weights. On GPUs cores are spawned.
"""

from __future__ import annotations

import atexit
import functools
import importlib
import logging
import multiprocessing
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from multiprocessing import context, current_process, forkserver, popen_forkserver, resource_tracker
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import setproctitle

from runspec.core.errors import UserError, one_line

_VARIABLE = "VLLM_RPC_BASE_PATH"
_EXIT_REASON_FILE = "cause"
_MAX_REASON = 400
_CORE_LOGGER = "vllm.v1.engine.core"
_PREFIX = "rvllm-"
_LONGEST = 107 - len("/00000000-0000-0000-0000-000000000000")
"""Most bytes of a folder's name: a socket's whole name has at most 107, vLLM's part of it 37."""
_REMOVE = """trap "" TERM
read -r _
for _ in 1 2 3 4 5; do rm -rf -- "$0" && break; done"""
"""Shell script that removes a folder once its input ends. It tries again, because an ending
process of vLLM's may put another socket there."""
_starting = threading.Lock()  # the variable belongs to the whole process


_LIBRARIES = (
    ("vllm", "libs/libtcmalloc*.so*"),
    ("torch", "../torch.libs/libgomp*.so*"),
    ("torch", "lib/libgomp*.so*"),
)
"""Libraries that vLLM preloads in an engine core on CPUs: package, and pattern in it."""
_PRELOAD = "LD_PRELOAD"
_ON_CPUS = "VLLM_CPU_OMP_THREADS_BIND"
"""What `runspec.local.machine.vllm_environment` sets for pools on CPUs only."""
_RESTARTED = "RUNSPEC_LD_PRELOAD"
"""Hands the program's own `LD_PRELOAD` through `restart_with_libraries`."""
_SERVER: Any = forkserver._forkserver  # noqa: SLF001 - Python names its one server only there
_FORK_SERVER = "sampler.engine.fork_server"
_has_libraries = False


class SocketFolder:
    """A private folder for sockets, removed by `remove` or when this process ends.

    Raises:
        UserError: it cannot be made, or its name is too long for a socket's.
    """

    def __init__(self) -> None:
        beside = os.environ.get(_VARIABLE) or tempfile.gettempdir()
        self.path = Path(beside, f"{_PREFIX}{secrets.token_hex(4)}")
        if len(os.fsencode(self.path)) > _LONGEST:
            raise UserError(
                f"no socket can lie in a folder whose name has over {_LONGEST} bytes",
                place=str(self.path),
                remedy=f"set TMPDIR or {_VARIABLE} to a shorter one",
            )
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE, str(self.path)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self.path.mkdir(mode=0o700)
        except OSError as error:
            self.remove()
            raise UserError(
                f"no folder can be made for vLLM's sockets: {error.strerror or error}",
                place=beside,
                remedy=f"mend it, or set {_VARIABLE} to another",
            ) from error

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Make processes that start inside the block put their sockets here; one engine at a
        time."""
        with _starting:
            before = os.environ.get(_VARIABLE)
            os.environ[_VARIABLE] = str(self.path)
            try:
                yield
            finally:
                if before is None:
                    del os.environ[_VARIABLE]
                else:
                    os.environ[_VARIABLE] = before

    def remove(self) -> None:
        """Remove the folder and the sockets in it; a second call does nothing."""
        self._remover.communicate()

    def leave_to_parent(self) -> None:
        """Make the end of this process, a fork of the folder's owner, not the end of the folder."""
        assert self._remover.stdin is not None
        self._remover.stdin.close()


class _ExitReasonHandler(logging.Handler):
    """Writes the last logged exception to a file."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = folder / _EXIT_REASON_FILE

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and (error := record.exc_info[1]) is not None:
            try:
                self._file.write_text(f"{type(error).__name__}: {error}")
            except OSError:  # for example a full disk; the core ends all the same
                self.handleError(record)


def record_exit_reason() -> None:
    """Record the exception that ends this engine core, for `read_exit_reason` of the worker."""
    folder = Path(os.environ.get(_VARIABLE, ""))
    if folder.name.startswith(_PREFIX):
        logging.getLogger(_CORE_LOGGER).addHandler(_ExitReasonHandler(folder))


def read_exit_reason(folder: Path) -> str:
    """Return, as one line, what ended the core whose sockets lie in a folder; empty if it recorded
    nothing."""
    file = folder / _EXIT_REASON_FILE
    return one_line(file.read_text(errors="replace"), _MAX_REASON) if file.exists() else ""


class EndsWithParent(BaseProcess):
    """Mixin for a context's process class: the process is killed as soon as its parent ends."""

    def run(self) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None

        def wait() -> None:
            parent.join()
            os.kill(os.getpid(), signal.SIGKILL)

        threading.Thread(target=wait, name="die-with-parent", daemon=True).start()
        super().run()


class _SpawnedProcess(EndsWithParent, context.SpawnProcess):
    """A spawned process."""


class Spawned(context.SpawnContext):
    """Context of `multiprocessing` whose spawned processes end with their parent."""

    Process = _SpawnedProcess


def in_vllm(start: context.BaseContext) -> SimpleNamespace:
    """Return a stand-in for the module `multiprocessing` in `vllm.utils.system_utils`.

    It makes vLLM start its processes in the context `start`.
    """
    return SimpleNamespace(get_context=lambda method: start)


SPAWNED = in_vllm(Spawned())


class _Handle(popen_forkserver.Popen):
    """Process handle for several threads: the exit code arrives once, through a pipe."""

    _lock = threading.Lock()

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        if flag != os.WNOHANG and self.returncode is None:
            wait([self.sentinel])
        with self._lock:
            return super().poll()


class _ForkedProcess(EndsWithParent, context.ForkServerProcess):
    """A forked process with the environment variables of the process that starts it."""

    variables: dict[str, str]

    @staticmethod
    def _Popen(process: _ForkedProcess) -> _Handle:  # type: ignore[override]
        process.variables = dict(os.environ)
        return _Handle(process)

    def run(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the server ignores it
        os.environ.clear()
        os.environ.update(self.variables)
        super().run()


class Forked(context.ForkServerContext):
    """Context of `multiprocessing` whose processes have imported what the server has."""

    Process = _ForkedProcess


CONTEXT = Forked()
FORKED = in_vllm(CONTEXT)
"""vLLM's own setting allows only spawning, and forking the worker, which has threads."""


def restart_with_libraries() -> None:
    """Start this program again with the libraries that vLLM's cores preload, on CPUs.

    Call it before anything heavy is imported. It returns in the program that has them, and does
    nothing where vLLM is imported already or whoever started this did not say that it is for CPUs.
    Processes that start later do not get them.
    """
    global _has_libraries
    setproctitle.getproctitle()  # locates the title by the environment, before that changes
    if "vllm" in sys.modules or _ON_CPUS not in os.environ:
        return
    given = os.environ.pop(_RESTARTED, None)
    if given is None:
        os.environ[_RESTARTED] = os.environ.get(_PRELOAD, "")
        _set_preload(_with_libraries())
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606
    _set_preload(given)
    _has_libraries = True


def serve(preload: str = "sampler.engine.preload") -> None:
    """Start the server unless it runs; it ends with this process.

    After `restart_with_libraries` this process imports vLLM and forks, so that both have it for one
    import. Other threads may hold locks at a fork: if there are any, Python is started anew.

    Args:
        preload: the module that it imports.
    """
    own: Any = current_process()
    own._config["tempdir"] = str(_folder().path)  # noqa: SLF001 - for the server's socket
    forkserver.set_forkserver_preload([_FORK_SERVER, preload])
    runs = _SERVER._forkserver_pid is not None  # noqa: SLF001 - see `_fork_server`
    if _has_libraries and threading.active_count() == 1 and not runs:
        importlib.import_module(preload)
        if threading.active_count() == 1:
            _fork_server()
            return
    before = os.environ.get(_PRELOAD, "")
    _set_preload(_with_libraries())
    try:
        forkserver.ensure_running()
    finally:
        _set_preload(before)


def _fork_server() -> None:
    """Do what `ensure_running` does, but fork this process instead of starting Python anew."""
    resource_tracker.ensure_running()
    address = str(_folder().path / "server")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        Path(address).chmod(0o600)
        listener.listen()
        read_end, write_end = os.pipe()  # the server ends when all writers have ended
        pid = os.fork()
        if pid == 0:
            try:
                os.close(write_end)
                _folder().leave_to_parent()
                importlib.import_module(_FORK_SERVER)
                with suppress(SystemExit):  # the end of the server
                    forkserver.main(listener.detach(), read_end, [])
            except Exception:
                logging.getLogger(__name__).exception("the fork server ended")
            finally:  # whatever happened, it is no second worker
                os._exit(0)
    os.close(read_end)
    _SERVER._forkserver_address = address  # noqa: SLF001 - as `ensure_running` does
    _SERVER._forkserver_alive_fd = write_end  # noqa: SLF001
    _SERVER._forkserver_pid = pid  # noqa: SLF001


@functools.cache
def _folder() -> SocketFolder:
    """Return the folder of the server's socket."""
    folder = SocketFolder()
    atexit.register(folder.remove)
    return folder


def _with_libraries() -> str:
    """Return what is preloaded already, and the libraries that vLLM preloads in an engine core.

    Each is the first match in the folder of its package, which is not imported.
    """
    found = []
    for package, pattern in _LIBRARIES:
        spec = find_spec(package)
        folders = (spec.submodule_search_locations or []) if spec else []
        found += [str(p) for folder in folders for p in sorted(Path(folder).glob(pattern))][:1]
    before = os.environ.get(_PRELOAD, "")
    return ":".join([*found, before] if before else found)


def _set_preload(value: str) -> None:
    if value:
        os.environ[_PRELOAD] = value
    else:
        os.environ.pop(_PRELOAD, None)
