"""Starts an isolated program, with the files that it may read, and controls it until its end."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO

from sampler.sandbox import filter as seccomp
from sampler.sandbox.inside import messages
from sampler.sandbox.inside.launcher import remove_scratch
from sampler.sandbox.inside.limits import READ_ALL, capabilities, landlock_abi
from sampler.sandbox.inside.messages import LANDLOCK, NAMESPACES, SECCOMP, Order
from sampler.sandbox.limits import Finished, Limits, judge

PYTHON = [sys.executable, "-I"]
"""How to start this interpreter in isolation; its arguments follow."""
SET_A = (NAMESPACES,)
SET_B = (LANDLOCK, SECCOMP)
"""Either set is enough. Namespaces hide everything else. Landlock forbids opening anything else,
and seccomp forbids the calls that reach it in other ways."""

START_S = 60.0
END_S = 30.0
_SETTLE_S = 5.0
"""Longest wait for the end of a program whose pipe has ended."""
STDERR_TAIL_BYTES = 64 << 10
PORTION_BYTES = 64 << 10
_HERE = str(Path(__file__).parent)
_LAUNCH = "import sys; sys.path.insert(0, sys.argv[1]); from inside.launcher import main; "
_LAUNCH += "main(int(sys.argv[2])); import os; os._exit(0)"  # no cleanup at exit
_SYSTEM = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/nix/store"]
_MAX_LINKS = 40
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LC_ALL": "C.UTF-8",
    # A pool of threads for each core would count against the limits.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
}


class NotIsolated(RuntimeError):
    """The program was not started: a mechanism does not work here, or a path is missing."""


class Isolated:
    """A running isolated program. Use it in a `with`, or call `kill`.

    Attributes:
        pid: of its supervisor, outside; killing the supervisor ends the program.
        stdin, stdout: binary pipes. The reader has to limit what it reads.
    """

    def __init__(
        self,
        supervisor: subprocess.Popen[bytes],
        control: socket.socket,
        limits: Limits,
        scratch: bytes,
    ) -> None:
        assert supervisor.stdin and supervisor.stdout and supervisor.stderr
        self.pid = supervisor.pid
        self.stdin: IO[bytes] = supervisor.stdin
        self.stdout: IO[bytes] = supervisor.stdout
        self.limits = limits
        self._supervisor = supervisor
        self._control = control
        self._lock = threading.Lock()
        self._finished: Finished | None = None
        self._scratch = scratch
        self._stderr = _Tail(supervisor.stderr, self.stop)

    @property
    def stderr(self) -> bytes:
        """The last 64 KiB that the program wrote to stderr so far."""
        return self._stderr.text

    @property
    def wrote_too_much(self) -> bool:
        """Whether it wrote more to stderr than `limit_stderr` allows."""
        return self._stderr.over

    def limit_stderr(self, limit: int) -> None:
        """End the program once it has written more than `limit` bytes to stderr."""
        self._stderr.limit = limit
        if self._stderr.over:
            self.stop()

    def stop(self) -> None:
        """Have the supervisor end the program, without waiting for it."""
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)

    def kill(self) -> Finished:
        """Kill the program with all its descendants; return once none is left."""
        self.stop()
        try:
            return self.wait(END_S)
        except TimeoutError:
            self._supervisor.kill()
            return self.wait(END_S)

    def wait(self, timeout_s: float | None) -> Finished:
        """Wait until no process of the program is left; return how it ended.

        Raises:
            TimeoutError: it has not ended in time.
        """
        if not self._lock.acquire(timeout=-1 if timeout_s is None else timeout_s):
            raise TimeoutError(f"another thread waits for the program, {timeout_s} s already")
        try:
            if self._finished is None:
                self._finished = self._collect(timeout_s)
            return self._finished
        finally:
            self._lock.release()

    def exit_reason(self) -> str:
        """Describe how a program that closed its pipe ended; kill it if it still runs."""
        try:
            return self.wait(_SETTLE_S).describe()
        except TimeoutError:
            self.kill()
            return "it closed its pipe"

    def _collect(self, timeout_s: float | None) -> Finished:
        try:
            self._supervisor.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"the isolated program runs after {timeout_s} s") from None
        self._control.setblocking(False)
        message: dict[str, str] = {}
        with contextlib.suppress(OSError):
            message = messages.read_answer(self._control, socket.socket.recv)
        self._stderr.close()
        for stream in (self.stdin, self.stdout):
            with contextlib.suppress(OSError):
                stream.close()
        self._control.close()
        if self._scratch:
            remove_scratch(self._scratch)
        return judge(message, self._stderr.text, self.limits)

    def await_start(self) -> None:
        """Wait until the program runs.

        Raises:
            NotIsolated: it does not start.
        """
        self._control.settimeout(START_S)
        try:
            message = messages.read_answer(self._control, socket.socket.recv)
        except TimeoutError:
            message = {"failed": f"the launcher said nothing for {START_S:g} s"}
        except ConnectionResetError:
            message = {}
        if "started" in message:
            return
        self.kill()  # and wait for all of its stderr
        last = self.stderr[-2000:].decode(errors="replace")
        raise NotIsolated(message.get("failed", f"the launcher ended: {last}"))

    def __enter__(self) -> Isolated:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()


class _Tail:
    """Reads a stream on a thread of its own and stores its last bytes.

    Args:
        stream: of the program.
        stop: called when the program has written more than `limit` bytes.
    """

    def __init__(self, stream: IO[bytes], stop: Callable[[], None]) -> None:
        self._stream, self._stop = stream, stop
        self.text = b""
        """The last 64 KiB."""
        self.total = 0
        self.limit: int | None = None
        self._thread = threading.Thread(target=self._read, name="stderr", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        return self.limit is not None and self.total > self.limit

    def close(self) -> None:
        """Wait for the end of the stream, which comes when all its writers have ended."""
        self._thread.join(END_S)
        if not self._thread.is_alive():
            self._stream.close()

    def _read(self) -> None:
        while part := os.read(self._stream.fileno(), PORTION_BYTES):
            self.text = (self.text + part)[-STDERR_TAIL_BYTES:]
            self.total += len(part)
            if self.over:
                self._stop()


def launch(
    command: Sequence[str],
    *,
    limits: Limits,
    mechanisms: Sequence[str],
    files: Mapping[str, bytes] | None = None,
    readable: Sequence[Path] = (),
) -> Isolated:
    """Start a program in isolation.

    Its working directory is a scratch directory: writable, limited, and removed afterwards. It can
    read the interpreter with its standard library, and `readable`. It has no network, no variable
    of the parent's environment and no open file except its three streams.

    Args:
        command: absolute path of the program (mostly `[*PYTHON, ...]`) and its arguments.
        limits: of the program.
        files: {path relative to the scratch directory: content} of files to create there.
        readable: further files and directories, for example site-packages.
        mechanisms: names of the mechanisms to apply. Without any only the limits apply, and the
            program can read what its user can read.

    Raises:
        NotIsolated: a mechanism fails, or the program or a path is missing.
    """
    order = _order(command, limits, files or {}, readable, tuple(mechanisms))
    ours, theirs = socket.socketpair()
    try:
        with theirs:
            supervisor = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LAUNCH, _HERE, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                cwd="/",
                env={},
                start_new_session=True,
            )
    except OSError:
        ours.close()
        if order.scratch:
            remove_scratch(order.scratch)
        raise
    process = Isolated(supervisor, ours, limits, order.scratch)
    try:
        # A launcher that ended too early wrote its reason to stderr.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            ours.settimeout(START_S)
            ours.sendall(messages.encode_order(vars(order)))
        process.await_start()
    except BaseException:
        process.kill()
        raise
    return process


def _order(
    command: Sequence[str],
    limits: Limits,
    files: Mapping[str, bytes],
    readable: Sequence[Path],
    mechanisms: tuple[str, ...],
) -> Order:
    contained = NAMESPACES in mechanisms
    if mechanisms and not contained and not set(SET_B) <= set(mechanisms):
        raise ValueError(f"{mechanisms} isolate nothing: {SET_A} or {SET_B} is needed")
    try:
        real, links = resolve_paths([*_interpreter(), Path(command[0]), *readable])
    except FileNotFoundError as error:
        raise NotIsolated(str(error)) from None
    order = Order()
    order.command = [os.fsencode(word) for word in command]
    order.environment = {k.encode(): v.encode() for k, v in _ENVIRONMENT.items()}
    order.files = [(_inside(name), content) for name, content in files.items()]
    order.readable, order.links = real, links
    order.mechanisms = list(mechanisms)
    if SECCOMP in mechanisms:
        order.filter = seccomp.build(contained=contained, signals_scoped=landlock_abi() >= 6)
    order.wall_s, order.cpu_s = limits.wall_s or 0.0, limits.cpu_s or 0.0
    order.memory, order.processes = limits.memory_bytes, limits.processes
    order.file_bytes = limits.file_bytes
    if not contained:
        order.read_all = bool(capabilities() & READ_ALL) and not open_to_all(real)
        order.scratch = os.fsencode(tempfile.mkdtemp(prefix="sandbox-"))
    return order


def _inside(name: str) -> bytes:
    """Return a file's name as bytes; refuse one outside of the scratch directory."""
    if name.startswith("/") or ".." in name.split("/") or "\0" in name or not name:
        raise ValueError(f"{name!r} is no path below the scratch directory")
    return os.fsencode(name)


@cache
def _interpreter() -> tuple[Path, ...]:
    """Return what this interpreter needs to start, with its standard library.

    The site-packages of a virtual environment are not included.
    """
    wanted = [sys.executable, f"{sys.prefix}/pyvenv.cfg", f"{sys.base_prefix}/lib", *_SYSTEM]
    return tuple(Path(path) for path in wanted if os.path.exists(path))


def resolve_paths(paths: Iterable[Path]) -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
    """Return real paths, none below another, and the symbolic links (path, target) on the way.

    Args:
        paths: files and directories, absolute.

    Raises:
        FileNotFoundError: a path is missing, or its links form a circle.
    """
    links: dict[str, str] = {}
    real = sorted({_follow(os.path.abspath(path), links) for path in paths})
    tops: list[str] = []
    for path in real:
        if not tops or not path.startswith(tops[-1].rstrip("/") + "/"):
            tops.append(path)
    below = tuple(path + "/" for path in tops)
    rows = [(path, target) for path, target in links.items() if not path.startswith(below)]
    return [os.fsencode(p) for p in tops], [(os.fsencode(p), os.fsencode(t)) for p, t in rows]


def _follow(path: str, links: dict[str, str]) -> str:
    """Return the real path; note each link on the way."""
    for _ in range(_MAX_LINKS):
        done = ""
        parts = path.strip("/").split("/")
        for index, part in enumerate(parts):
            done += f"/{part}"
            if os.path.islink(done):
                links[done] = target = os.readlink(done)
                rest = "/".join(parts[index + 1 :])
                path = os.path.normpath(os.path.join(os.path.dirname(done), target, rest))
                break
        else:
            if not os.path.exists(path):
                raise FileNotFoundError(f"{path} is not there")
            return path
    raise FileNotFoundError(f"{path}: too many symbolic links")


def open_to_all(paths: Iterable[bytes]) -> bool:
    """Whether any user may reach and read these paths."""
    for path in paths:
        if not os.stat(path).st_mode & 0o004:
            return False
        while path := os.path.dirname(path):
            if not os.stat(path).st_mode & 0o001:
                return False
            if path == b"/":
                break
    return True
