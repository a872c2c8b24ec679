"""`runspec render`: prints the resolved spec, or writes the files that start it on a cluster."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import yaml

from runspec.cli.output import words_of
from runspec.core.errors import BadUsage, UserError, bad_usage
from runspec.core.files import require_writable, write_atomic
from runspec.core.schema import RunSpec
from runspec.core.schema.load import SpecFiles

EXIT_FINDINGS, EXIT_UNREADABLE = 1, 2


@bad_usage()
def render_command(files: SpecFiles, show_origin: bool, output: str) -> int:
    """Prints the spec that the layers make, every default written out; returns the exit code.

    Secrets are there by the names of their variables, as in the spec itself.
    """
    from runspec.core.schema.findings import format_finding
    from runspec.core.schema.load import origin, origins
    from runspec.core.schema.yaml_text import to_yaml
    from runspec.lint.check import check_spec

    checked = check_spec(files)
    if checked.kind != "Run":
        what = f"a file of kind {checked.kind} is no spec"
        raise UserError(what, place=str(files.path), remedy="render a spec")
    errors = [finding for finding in checked.findings if finding.severity == "error"]
    if checked.spec is None or errors:
        for finding in errors:
            print(format_finding(finding), file=sys.stderr)
        return EXIT_FINDINGS
    resolved = checked.spec.model_dump(mode="json", by_alias=True)
    if output == "json":
        if show_origin:
            resolved = {"spec": resolved, "origin": origins(checked, files, resolved)}
        print(json.dumps(resolved, indent=2, ensure_ascii=False))
    elif show_origin:
        print(to_yaml(resolved, lambda at: origin(checked, files, at)), end="")
    else:
        print(to_yaml(resolved), end="")
    return 0


def render_backend_command(
    files: SpecFiles, backend: Literal["kubernetes", "slurm"], out: Path | None, runs: Path | None
) -> int:
    """Writes the files from which a backend starts the run; returns the exit code.

    Args:
        files: the spec.
        backend: the backend that reads the files.
        out: the folder of the manifests, or the file of the script.
        runs: the folder of runs; the keys stay there, outside of `out`.

    Raises:
        BadUsage: `out` is missing.
        UserError: the spec cannot run there, or a folder cannot be written.
    """
    from runspec.backends.kubernetes.render import render_site
    from runspec.backends.slurm import sbatch_script
    from runspec.cli.spec_files import sound_spec
    from runspec.local.run_dir import run_directory

    if out is None:
        raise BadUsage(
            f"--backend {backend} writes files", place="render", remedy="say where to with -o"
        )
    spec = sound_spec(files)
    run_dir = run_directory(spec, runs)
    if backend == "slurm":
        # Absolute paths: a script runs in any folder.
        placement = files.placement and files.placement.absolute()
        there = replace(files, path=files.path.absolute(), placement=placement)
        script = sbatch_script(spec, words_of(there, runs and runs.absolute()), run_dir)
        require_writable(out.absolute().parent, "the script's folder", "name another file with -o")
        write_atomic(out, script.encode())
        print(f"Start the run, and continue it: sbatch {out}")
    else:
        _write_manifests(spec, render_site(spec, run_dir), out)
    return 0


def _write_manifests(spec: RunSpec, objects: list[dict[str, Any]], out: Path) -> None:
    require_writable(out, "the folder of the manifests", "name another one with -o")
    path = out / f"{spec.name}.yaml"
    write_atomic(path, yaml.safe_dump_all(objects, sort_keys=False).encode(), mode=0o600)
    print(f"{len(objects)} objects are in {path}, private keys among them: keep it from others.")
    print(f"Start the run: kubectl apply --server-side -f {path}")
    for secret in spec.secrets[:1]:
        name = objects[-1]["metadata"]["name"]
        print(f"Before that, make the Secret {name}-env, with {secret.source.env} and so on.")
