"""Backend for a run whose directory and roles are on one other machine, reached by ssh."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from runspec.core.schema import RunSpec
from runspec.core.schema.load import dump_resolved
from runspec.local.backend import AT_TRUNK, LocalProcesses, Processes
from runspec.local.processes import PreparedRun
from runspec.local.run_dir import note_site, run_directory


class SshBackend:
    """`placement.backend: ssh`, with the machine in `placement.address`."""

    def apply(self, spec: RunSpec, detach: bool, runs_dir: Path | None) -> int:
        """Send the resolved spec, note where the run is, and start it there."""
        site = {"backend": "ssh", "address": spec.placement.address, "run": spec.name}
        note_site(run_directory(spec, runs_dir), site)
        detached = ["--detach"] if detach else []
        return _there(
            site, ["apply", "--resolved", "-", "--runs-dir", "runs", *detached], dump_resolved(spec)
        )

    def command(self, site: Mapping[str, str], arguments: Sequence[str]) -> int:
        """Run a command there, where the run is below `runs/`: the last `--runs-dir` counts."""
        return _there(site, [*arguments, "--runs-dir", "runs"])

    def processes(self, run: PreparedRun) -> tuple[Processes, PreparedRun]:
        """On that machine every role is a child of the supervisor."""
        return LocalProcesses(run.directory / "logs"), run


def _there(site: Mapping[str, str], arguments: Sequence[str], given: bytes | None = None) -> int:
    """Return the exit code of `runspec ARGUMENT...` there, whose output appears here."""
    terminal = ["-t"] if given is None else []
    command = shlex.join(["env", f"{AT_TRUNK}={site['address']}", "runspec", *arguments])
    ssh = ["ssh", *terminal, site["address"], command]
    return subprocess.run(ssh, input=given).returncode
