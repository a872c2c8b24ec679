"""A run whose roles are started by the commands of docs/site.md, each on a machine of its own."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.harness import LiveRun
from tests.site_page import ADMIN, TRUNK, Machines, command_on, commands, free_ports

OTHERS = ("relay", "validator")
"""Machines with a role beside the trunk's; the page's samplers and evaluator are left out."""


class SiteRun(LiveRun):
    """A LiveRun that the trunk alone supervises; the run directory exists for nobody else."""

    def __init__(self, machines: Machines, overrides: Mapping[str, Any]) -> None:
        base = {"placement.base_port": free_ports(4)}
        super().__init__(machines.runs, "target-short", {**overrides, **base})
        self.machines = machines
        self.others: dict[str, subprocess.Popen[bytes]] = {}

    def apply(self) -> None:
        """Prepares the site, and starts trunk, relay and validator with the bundles they need."""
        prepare, sets = command_on(ADMIN, "runspec prepare"), self.words
        self.machines.call(ADMIN, [*prepare, *sets[sets.index("--set") :]])
        for machine, words in commands():
            to = words[-1].removesuffix(":")
            if machine == ADMIN and words[0] == "scp" and to in (TRUNK, *OTHERS):
                self.machines.call(ADMIN, words)
        self.runs_dir.mkdir(parents=True, exist_ok=True)
        role = command_on(TRUNK, "runspec role")
        self.process = self.machines.start(TRUNK, role, self._output)
        for machine in OTHERS:
            self.start(machine)

    def start(self, machine: str) -> None:
        """Starts the role of a machine, or starts it again after it was killed."""
        role = command_on(machine, "runspec role")
        self.others[machine] = self.machines.start(machine, role, self.log(machine))

    def kill(self, machine: str) -> None:
        """Kills the role of a machine, which has to be alive and see no run directory."""
        process = self.others[machine]
        mounts = Path(f"/proc/{process.pid}/mountinfo").read_text()
        assert f" {self.runs_dir} " in mounts, f"{machine} sees the run directory"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()

    def log(self, machine: str) -> Path:
        """What the role of a machine printed."""
        return self.machines.on(machine) / "log"

    def stop(self) -> None:
        super().stop()
        for process in self.others.values():
            process.terminate()
        for process in self.others.values():
            process.wait()

    def output(self) -> str:
        logs = [f"--- {name}\n{self.log(name).read_text()[-1500:]}" for name in self.others]
        return "\n".join([super().output(), *logs])
