"""A run of the laptop profile on a `Cluster`, applied from a machine that is none of its nodes."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from runspec.local.backend import EXIT_INTERRUPTED
from tests.e2e.ray_cluster import Cluster, Node
from tests.harness import ROOT
from tests.site_page import RAY, command_on
from tests.waiting import HANG_S, eventually

NAME = "target-short"
SAMPLING = ("learner.hosts=2", "verify.lease_timeout=30s", "evaluations=null")
"""Values of a run with samplers and a learner of two hosts."""


class RayRun:
    """A run that a machine beside the cluster starts and watches.

    Args:
        cluster: its second node is the trunk's.
        steps: of the run.
        resources: what its role groups ask for, as `placement.resources` has it.
        others: further values of the spec, as `--set` takes them.
        spec: its file under `specs`, which has a profile `laptop`.
    """

    def __init__(
        self,
        cluster: Cluster,
        steps: int,
        resources: str,
        *others: str,
        spec: str = "target_short.yaml",
    ) -> None:
        self.cluster, self._steps, self._resources = cluster, steps, resources
        self._others, self._spec = others, spec
        self.runs_dir = cluster.site / "runs"
        self.output = cluster.folder / "apply.log"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def trunk(self) -> Node:
        return self.cluster.nodes[1]

    @property
    def dir(self) -> Path:
        """The run directory, as this test alone may look at it."""
        return self.trunk.folder / "runs" / NAME

    def words(self) -> list[str]:
        values = (
            f"steps={self._steps}",
            f"placement.address={self.cluster.address}",
            f"placement.resources={self._resources}",
            f"name={NAME}",
            f"storage.dir={self.runs_dir}",
            f"storage.scratch={self.cluster.site}/scratch",
            "storage.shared=true",
            "checkpoints.every=3",
            f"checkpoints.dir={self.cluster.folder}/checkpoints",
            f"learner.compile_cache={self.cluster.folder}/compiled",
            *self._others,
        )
        shown = command_on("head", "runspec apply", RAY)
        small = [str(ROOT / "specs" / self._spec), "--profile", "laptop"]
        return [
            *("apply", *small, *shown[shown.index("--set") :]),
            *(word for value in values for word in ("--set", value)),
        ]

    def apply(self) -> None:
        """As the page on sites shows it, with the small profile in the place of TARGET-LONG."""
        self.process = self.start(*self.words())

    def start(self, *words: str, output: Path | None = None) -> subprocess.Popen[bytes]:
        """Starts a `runspec` command, whose output is in a file, `output` where none is named."""
        with (output or self.output).open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "runspec", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.cluster.folder,
            )

    def change(self, value: str) -> str:
        """Applies the spec again with another value; what that prints."""
        done = subprocess.run(
            [sys.executable, "-P", "-m", "runspec", *self.words(), "--set", value],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def command(self, *words: str, code: int = 0) -> str:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "runspec", *words, "--runs-dir", str(self.runs_dir)],
            capture_output=True,
            text=True,
            timeout=HANG_S,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def steps(self) -> int:
        """Steps that are trained."""
        path = self.dir / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def shown(self) -> str:
        return self.output.read_text()[-4000:]

    def ended(self) -> str:
        process = self.process
        return f"`apply` ended ({process.returncode})" if process and process.poll() else ""

    @property
    def all_steps(self) -> int:
        return self._steps

    def reach(self, step: int, *, alone: bool = False) -> None:
        """Waits for a step; `alone` where the run goes on without whoever applied it."""
        eventually(
            lambda: self.steps() >= step,
            f"step {step} is trained",
            hopeless=str if alone else self.ended,
            context=self.shown,
        )

    def interrupt_and_go_on(self) -> None:
        """Ends `apply` by Ctrl-C, and with it the run; then goes on with it."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(HANG_S) == EXIT_INTERRUPTED, self.shown()
        assert "interrupted" in self.command("status", NAME)
        self.process = self.start("resume", NAME, "--runs-dir", str(self.runs_dir))

    def pause_and_go_on(self) -> None:
        """Pauses the run, which ends `apply`, and goes on with it in the background."""
        self.command("pause", NAME)
        assert self.process is not None
        assert self.process.wait(HANG_S) == 0, self.shown()
        assert "paused" in self.command("status", NAME)
        self.command("resume", NAME, "--detach")

    def await_state(self, word: str) -> None:
        """Waits until `status` says so."""
        eventually(
            lambda: word in self.command("status", NAME),
            f"the run is {word}",
            context=self.shown,
            poll_s=1.0,
        )

    def audit(self) -> None:
        """The ledger and its files agree: each rollout that a batch names was trained once."""
        done = subprocess.run(
            [sys.executable, "-m", "verify", "audit", str(self.dir)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert self.steps() == self._steps
