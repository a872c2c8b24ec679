"""Starts an isolated program within limits, controls it, and says how it ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Literal

from sampler.sandbox import filter as seccomp
from sampler.sandbox.inside import control
from sampler.sandbox.inside.kernel import READ_ALL, capabilities, landlock_abi
from sampler.sandbox.inside.launcher import remove_scratch

PYTHON = [sys.executable, "-I"]
"""How to start this interpreter in isolation; its arguments follow."""
SET_A = (control.NAMESPACES,)
SET_B = (control.LANDLOCK, control.SECCOMP)
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
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
    "MALLOC_ARENA_MAX": "2",
}
REPEATABLE = {
    "PYTHONHASHSEED": "0",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2_Usable,-AVX2,-FMA_Usable,-FMA,-FMA4_Usable,-FMA4",
}
"""By which a program prints the same everywhere; libm has variants by processor."""


Outcome = Literal[
    "exit", "signal", "time", "cpu", "memory", "processes", "files", "output", "killed"
]


_IN_WORDS: dict[Outcome, str] = {
    "time": "it took too long",
    "cpu": "it took too much CPU time",
    "memory": "it took too much memory",
    "processes": "it started too many processes",
    "files": "it wrote too much",
    "output": "it printed too much",
    "killed": "killed",
}


@dataclass(frozen=True)
class Limits:
    """Limits of one isolated program.

    Attributes:
        wall_s: seconds from its start; None is no limit.
        cpu_s: seconds of CPU of all its processes together; None is no limit.
        memory_bytes: address space of each process, and memory of all together. The sum is checked
            every 50 ms; between two checks the limit is `processes * memory_bytes`.
        processes: processes and threads at a time.
        file_bytes: of a file, and of everything in the scratch directory.
        output_bytes: of stdout and of stderr each, where `run` reads them.
    """

    wall_s: float | None = 10.0
    cpu_s: float | None = 10.0
    memory_bytes: int = 512 << 20
    processes: int = 32
    file_bytes: int = 16 << 20
    output_bytes: int = 1 << 20


@dataclass(frozen=True)
class Finished:
    """How an isolated program ended.

    Attributes:
        outcome: `exit` by itself, `signal` (a crash), or the limit that it hit: `time`, `cpu`,
            `memory`, `processes`, `files`, `output`; `killed` by its parent. If the program itself
            noticed the limit and ended (MemoryError, no further process), the last line of stderr
            shows which one. A program can fake that line, but it has failed either way.
        code: exit status with `exit`; minus the signal's number with `signal`; else -9.
        stdout: its standard output, cut at the limit; empty after `start`.
        stderr: the last 64 KiB of it.
        wall_s, cpu_s: seconds; CPU time of all its processes, those that were killed up to the
            last check.
        peak_bytes: largest memory seen, of one process or of all.
    """

    outcome: Outcome
    code: int
    stdout: bytes = b""
    stderr: bytes = b""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    peak_bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether it ended by itself with status 0."""
        return self.outcome == "exit" and self.code == 0

    def describe(self) -> str:
        """Return the limit that was hit, the signal, or the exit code with stderr's last line."""
        if self.outcome == "exit":
            last = self.stderr.decode(errors="replace").strip().splitlines()[-1:]
            return " ".join([f"exit code {self.code}", *(line[:200] for line in last)])
        if self.outcome != "signal":
            return _IN_WORDS[self.outcome]
        known = -self.code in set(signal.Signals)
        return f"killed by {signal.Signals(-self.code).name if known else f'signal {-self.code}'}"


_LAST_WORDS: dict[Outcome, tuple[bytes, ...]] = {
    "memory": (b"MemoryError", b"terminate called after throwing an instance of 'std::bad_alloc"),
    "processes": (b"BlockingIOError: [Errno 11]", b"RuntimeError: can't start new thread"),
    "files": (b"OSError: [Errno 27]", b"OSError: [Errno 28]"),
}


def judge(message: Mapping[str, str], stderr: bytes, limits: Limits) -> Finished:
    """Return how the program ended, from the launcher's last message: `verdict`, `wall_s`, `seen`,
    `cpu_seen`, and, if the program ended by itself, `status`, `cpu_s`, `peak`."""
    code = os.waitstatus_to_exitcode(int(message.get("status", signal.SIGKILL)))
    verdict: Any = message.get("verdict", "killed")
    if not verdict and "status" not in message:
        verdict = "killed"  # the init process itself was killed from outside
    cpu_s = max(float(message.get(name, 0.0)) for name in ("cpu_s", "cpu_seen"))
    outcome: Outcome = verdict or ("signal" if code < 0 else "exit")
    if not verdict:
        last = stderr.rstrip().rpartition(b"\n")[2]
        for limit, words in _LAST_WORDS.items():
            if code != 0 and last.startswith(words):
                outcome = limit
        if code == -signal.SIGXCPU or (code == -9 and limits.cpu_s and cpu_s > limits.cpu_s):
            outcome = "cpu"
    return Finished(
        outcome,
        -9 if verdict else code,
        stderr=stderr,
        wall_s=float(message.get("wall_s", 0.0)),
        cpu_s=cpu_s,
        peak_bytes=max(int(message.get(name, 0)) for name in ("peak", "seen")),
    )


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
        channel: socket.socket,
        limits: Limits,
        scratch: bytes,
    ) -> None:
        assert supervisor.stdin and supervisor.stdout and supervisor.stderr
        self.pid = supervisor.pid
        self.stdin: IO[bytes] = supervisor.stdin
        self.stdout: IO[bytes] = supervisor.stdout
        self.limits = limits
        self._supervisor, self._control, self._scratch = supervisor, channel, scratch
        self._lock = threading.Lock()
        self._finished: Finished | None = None
        self.stderr = b""
        """The last 64 KiB that the program wrote to stderr so far."""
        self._written, self._most = 0, float("inf")
        self._reader = threading.Thread(target=self._read_stderr, name="stderr", daemon=True)
        self._reader.start()

    @property
    def wrote_too_much(self) -> bool:
        """Whether it wrote more to stderr than `limit_stderr` allows."""
        return self._written > self._most

    def limit_stderr(self, limit: int) -> None:
        """End the program once it has written more than `limit` bytes to stderr."""
        self._most = limit
        if self.wrote_too_much:
            self.stop()

    def _read_stderr(self) -> None:
        assert self._supervisor.stderr
        while part := os.read(self._supervisor.stderr.fileno(), PORTION_BYTES):
            self.stderr = (self.stderr + part)[-STDERR_TAIL_BYTES:]
            self._written += len(part)
            if self.wrote_too_much:
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
            message = control.read_answer(self._control, socket.socket.recv)
        streams = [self.stdin, self.stdout]
        self._reader.join(END_S)  # the stream ends when all its writers have ended
        if not self._reader.is_alive() and self._supervisor.stderr:
            streams.append(self._supervisor.stderr)
        for stream in streams:
            with contextlib.suppress(OSError):
                stream.close()
        self._control.close()
        if self._scratch:
            remove_scratch(self._scratch)
        return judge(message, self.stderr, self.limits)

    def await_start(self) -> None:
        """Wait until the program runs.

        Raises:
            NotIsolated: it does not start.
        """
        self._control.settimeout(START_S)
        try:
            message = control.read_answer(self._control, socket.socket.recv)
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


def launch(
    command: Sequence[str],
    *,
    limits: Limits,
    mechanisms: Sequence[str],
    files: Mapping[str, bytes] | None = None,
    readable: Sequence[Path] = (),
    repeatable: bool = False,
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
        repeatable: whether two runs have the same addresses, variants of libm's functions and
            (without `-I`) hashes of texts.

    Raises:
        NotIsolated: a mechanism fails, or the program or a path is missing.
    """
    contained = control.NAMESPACES in mechanisms
    if mechanisms and not contained and not set(SET_B) <= set(mechanisms):
        raise ValueError(f"{tuple(mechanisms)} isolate nothing: {SET_A} or {SET_B} is needed")
    try:
        real, links = resolve_paths([*_interpreter(), Path(command[0]), *readable])
    except FileNotFoundError as error:
        raise NotIsolated(str(error)) from None
    for name in files or ():
        if name.startswith("/") or ".." in name.split("/") or "\0" in name or not name:
            raise ValueError(f"{name!r} is no path below the scratch directory")
    program = b""
    if control.SECCOMP in mechanisms:
        program = seccomp.build(contained=contained, signals_scoped=landlock_abi() >= 6)
    read_all = not contained and bool(capabilities() & READ_ALL) and not open_to_all(real)
    variables = _ENVIRONMENT | (REPEATABLE if repeatable else {})
    order = control.Order(
        command=[os.fsencode(word) for word in command],
        environment={name.encode(): value.encode() for name, value in variables.items()},
        files=[(os.fsencode(name), content) for name, content in (files or {}).items()],
        readable=real,
        links=links,
        mechanisms=list(mechanisms),
        filter=program,
        scratch=b"" if contained else os.fsencode(tempfile.mkdtemp(prefix="sandbox-")),
        read_all=read_all,
        repeatable=repeatable,
        **vars(limits),
    )
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
            ours.sendall(control.encode_order(order))
        process.await_start()
    except BaseException:
        process.kill()
        raise
    return process


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
