"""Hostile programs in the sandbox, and the machine before and after them."""

from __future__ import annotations

import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from sampler.sandbox import PYTHON, Limits, probe, run, start
from sampler.sandbox.limits import Finished
from sampler.sandbox.process import SET_A, SET_B, Isolated
from tests.waiting import eventually

SETS = {"A": SET_A, "B": SET_B, "A and B": (*SET_A, *SET_B)}
LIMITS = Limits(wall_s=20.0, cpu_s=10.0, memory_bytes=256 << 20, processes=8, file_bytes=4 << 20)

PRELUDE = """
import ctypes, fcntl, os, signal, socket, sys, time
libc = ctypes.CDLL(None, use_errno=True)
X86 = os.uname().machine == "x86_64"

def call(x86, arm, *arguments):
    number = x86 if X86 else arm
    result = libc.syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def attempt(name, function):
    try:
        got = function()
    except (OSError, ValueError) as error:
        print(name, "refused", type(error).__name__, error, flush=True)
    else:
        print(name, "GOT", repr(got)[:300], flush=True)
"""


@dataclass
class Sandbox:
    """Runs attacks under one set of mechanisms, in a temporary directory that is the test's own."""

    mechanisms: Sequence[str]
    directory: Path
    token: str = field(default_factory=lambda: f"attack-{uuid.uuid4().hex}")

    @property
    def contained(self) -> bool:
        """Whether namespaces are among the mechanisms."""
        return "namespaces" in self.mechanisms

    @property
    def filtered(self) -> bool:
        """Whether a seccomp filter is among them."""
        return "seccomp" in self.mechanisms

    def command(self, source: str) -> list[str]:
        return [*PYTHON, "-S", "-c", PRELUDE + source, self.token]

    def run(
        self,
        source: str,
        *,
        limits: Limits = LIMITS,
        files: Mapping[str, bytes] | None = None,
        readable: Sequence[Path] = (),
    ) -> Finished:
        """Runs a program to its end and holds the machine against what it was before."""
        with self.unchanged():
            return run(
                self.command(source),
                limits=limits,
                files=files,
                readable=readable,
                mechanisms=self.mechanisms,
            )

    def start(self, source: str, *, limits: Limits = LIMITS) -> Isolated:
        return start(self.command(source), limits=limits, mechanisms=self.mechanisms)

    def attempts(self, source: str, *, readable: Sequence[Path] = ()) -> dict[str, str]:
        """{name: outcome} of the program's `attempt` calls."""
        finished = self.run(source, readable=readable)
        assert finished.ok, finished
        rows = [line.partition(" ")[::2] for line in finished.stdout.decode().splitlines()]
        assert rows, finished
        return dict(rows)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """No process, no file of the attack outlives it, and no descriptor stays open here."""
        before = _open_files()
        yield
        assert self.processes() == []
        assert list(self.directory.iterdir()) == []
        assert _open_files() <= before

    def processes(self) -> list[int]:
        """Process ids of everything that still runs the attack (launcher and guard aside)."""
        found = []
        for path in Path("/proc").iterdir():
            try:
                if path.name.isdigit() and self.token.encode() in (path / "cmdline").read_bytes():
                    found.append(int(path.name))
            except OSError:
                continue
        return found

    def until_running(self, count: int = 1) -> None:
        eventually(lambda: len(self.processes()) >= count, f"{count} processes of the attack")

    def until_gone(self) -> None:
        eventually(lambda: self.processes() == [], "the end of the attack's processes")


def _open_files() -> set[str]:
    """What this process has open, pipes and sockets by their numbers."""
    found = set()
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of this very look
            found.add(str(path.readlink()))
    return found


def refused(attempts: Mapping[str, str]) -> bool:
    """Whether every attempt failed."""
    return all(outcome.startswith("refused") for outcome in attempts.values())


def make_sandbox(name: str, directory: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    """A sandbox of a named set; skips where this machine lacks the set."""
    missing = set(SETS[name]) - set(probe().working)
    if missing:
        pytest.skip(f"{', '.join(sorted(missing))} not available here")
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return Sandbox(SETS[name], directory)
