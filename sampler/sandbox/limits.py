"""How much an isolated program may use, and how it ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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
        """Return one line: the limit that was hit, the signal, or the exit code with the last line
        of stderr."""
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
