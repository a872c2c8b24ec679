"""The caller's side: `runspec` commands reach the cluster through its API."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import typer

from runspec.backends.kubernetes.naming import cluster_of
from runspec.backends.kubernetes.remote import RemoteRun
from runspec.backends.kubernetes.render import SITE, render_site
from runspec.core.spec.resolved import load_resolved
from runspec.core.spec.role_names import STAGES, trunk_names
from runspec.core.spec.schema import RunSpec
from runspec.local.backend import LocalProcesses, Processes
from runspec.local.processes import PreparedRun
from runspec.local.run_dir import note_site, run_directory


class KubernetesBackend:
    """`placement.backend: kubernetes`."""

    def apply(self, spec: RunSpec, detach: bool, runs_dir: Path | None) -> int:
        """Starts or changes the run; it goes on there in any case, so `detach` changes nothing."""
        run_dir = run_directory(spec, runs_dir)
        objects = render_site(spec, run_dir)
        RemoteRun(spec).apply(objects)
        namespace = cluster_of(spec).namespace
        note_site(run_dir, {"backend": "kubernetes", "run": spec.name, "namespace": namespace})
        print(f"{spec.name} is on the cluster. See how far it is: runspec status {run_dir}")
        return 0

    def command(self, site: Mapping[str, str], arguments: Sequence[str]) -> int:
        folder = Path(site["runs_dir"]) / site["run"] / SITE
        run = RemoteRun(load_resolved(folder))
        match arguments[0]:
            case "pause":
                return run.pause()
            case "resume":
                return run.resume()
            case "logs":
                return _logs(run, arguments)
            case "delete":
                if not {"--yes", "-y"} & set(arguments):
                    question = f"Delete {site['run']} on its cluster with everything in it?"
                    typer.confirm(question, abort=True)
                run.delete()
                shutil.rmtree(folder)
                print(f"Deleted {site['run']} on its cluster")
                return 0
        return run.inside(arguments)

    def processes(self, run: PreparedRun) -> tuple[Processes, PreparedRun]:
        """The trunk's pod is one machine."""
        return LocalProcesses(run.directory / "logs"), run


def _logs(run: RemoteRun, arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--role")
    parser.add_argument("-f", "--follow", action="store_true")
    parser.add_argument("--tail", type=int)
    asked, _ = parser.parse_known_args(list(arguments))
    if asked.role is None or asked.role in (*trunk_names(run.spec), *STAGES):
        return run.inside(arguments)
    return run.logs(asked.role, asked.follow, asked.tail)
