"""Runs as a user starts them: the `runspec` command, its files, and waits with deadlines."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from runspec.local.run_view import look_at
from tests.waiting import HANG_S, eventually, one_ended

ROOT = Path(__file__).resolve().parent.parent
TARGET_SHORT = ROOT / "specs" / "target_short.yaml"

SMALL: Mapping[str, Any] = {
    "steps": 6,
    "algorithm.prompts_per_step": 4,
    "algorithm.group_size": 4,
    "algorithm.updates_per_step": 1,
    "algorithm.advantage.normalize": "none",
    "algorithm.filters.zero_variance": "false",  # answers of an untrained model earn the same
    "algorithm.old_logprobs": "sampler",
    "warm_start.stop_answer_probability": 1e-9,
    "checkpoints.every": 2,
    "verify.lease_timeout": "20s",
    "evaluations": "null",
}
"""The laptop profile, cut down until a run takes seconds once its engines are up."""


_holders: list[socket.socket] = []


def free_port(count: int = 1) -> int:
    """The first of consecutive ports for servers; bound here, so that nobody else gets them."""
    while True:
        ports: list[int] = []
        with suppress(OSError):  # the next one is taken
            for _ in range(count):
                _holders.append(holder := socket.socket())
                holder.bind(("127.0.0.1", ports[-1] + 1 if ports else 0))
                # As servers set it; before `bind` it would let two tests have one port.
                holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                ports.append(holder.getsockname()[1])
            return ports[0]


def runspec(*arguments: str | Path, timeout_s: float = HANG_S) -> subprocess.CompletedProcess[str]:
    """Runs the command to its end and returns what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "runspec", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """A process that gets no processor time inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@dataclass
class LiveRun:
    """A run that `runspec apply` drives in a child process; leaving the `with` block ends it."""

    runs_dir: Path
    name: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    spec: Path = TARGET_SHORT
    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> LiveRun:
        self.apply()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    @property
    def dir(self) -> Path:
        return self.runs_dir / self.name

    @property
    def words(self) -> list[str]:
        """The spec and its options, as every command takes them."""
        values = {**SMALL, **self.overrides, "name": self.name}
        sets = [text for path, value in values.items() for text in ("--set", f"{path}={value}")]
        where = ["--profile", "laptop", "--runs-dir", str(self.runs_dir)]
        return [str(self.spec), *where, *sets, "--set", self.compile_cache]

    @property
    def compile_cache(self) -> str:
        """All runs of a test session compile into one folder, where warm starts lie, too."""
        return f"learner.compile_cache={self.runs_dir.parent}/.cache/learner"

    def apply(self) -> None:
        """Starts, or starts again, `runspec apply`."""
        self.runs_dir.mkdir(parents=True, exist_ok=True)
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "runspec", "apply", *self.words],
                cwd=ROOT,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def stop(self) -> None:
        """Ctrl-C, then the end of patience."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(HANG_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()

    def finish(self) -> dict[str, Any]:
        """Waits for the run's own end and returns summary.json."""
        assert self.process is not None
        code = self.process.wait(HANG_S)
        assert code == 0, self.output()
        return json.loads((self.dir / "summary.json").read_text())

    def metrics(self) -> list[dict[str, Any]]:
        path = self.dir / "metrics.jsonl"
        if not path.exists():
            return []
        whole = path.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def wait_until(
        self,
        condition: Callable[[], Any],
        what: str,
        others: Sequence[subprocess.Popen[bytes]] = (),
    ) -> None:
        """Waits for a condition while the run and the `others` are alive."""
        assert self.process is not None
        needed = [self.process, *others]
        eventually(
            condition,
            what,
            hopeless=lambda: one_ended(needed),
            context=self.output,
            poll_s=0.1,
        )

    def wait_for_step(self, step: int) -> None:
        """Waits until `step` steps have been trained."""
        self.wait_until(lambda: len(self.metrics()) >= step, f"step {step}")

    def status(self) -> dict[str, Any]:
        done = runspec("status", self.name, "--runs-dir", self.runs_dir, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def pids(self) -> dict[str, int | None]:
        """Of each role there is: what `status` says, without a process for every look."""
        return {role.name: role.pid for role in look_at(self.dir, events=0, ledger=False).roles}

    def output(self) -> str:
        """The end of what `apply` printed and of every role's log."""
        texts = {"apply": self._output.read_text(errors="replace")[-3000:]}
        for log in sorted((self.dir / "logs").glob("*.log")):
            texts[log.stem] = log.read_text(errors="replace")[-1500:]
        return "\n".join(f"--- {name}\n{text}" for name, text in texts.items())

    @property
    def _output(self) -> Path:
        return self.runs_dir / f"{self.name}.out"
