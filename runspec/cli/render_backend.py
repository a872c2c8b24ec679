"""`runspec render --backend`: what starts a run on a cluster, as files."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml

from runspec.backends.kubernetes.render import render_site
from runspec.backends.slurm import sbatch_script
from runspec.cli.spec_files import sound_spec
from runspec.core.errors import BadUsage
from runspec.core.files import require_writable, write_atomic
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.schema import RunSpec
from runspec.local.run_dir import run_directory


def render_backend_command(
    files: SpecFiles, backend: Literal["kubernetes", "slurm"], out: Path | None, runs: Path | None
) -> int:
    """Writes what a backend starts the run from; returns the exit code.

    Args:
        files: the spec.
        backend: whose files.
        out: the folder of the manifests, or the file of the script.
        runs: where runs lie; the keys are kept there, outside of `out`.

    Raises:
        BadUsage: `out` is missing.
        UserError: the spec cannot run there, or a folder cannot be written.
    """
    if out is None:
        raise BadUsage(
            f"--backend {backend} writes files", place="render", remedy="say where to with -o"
        )
    spec = sound_spec(files)
    if backend == "slurm":
        script = sbatch_script(spec, _words(files, runs), run_directory(spec, runs))
        require_writable(out.absolute().parent, "the script's folder", "name another file with -o")
        write_atomic(out, script.encode())
        print(f"Start the run, and continue it: sbatch {out}")
    else:
        _write_manifests(spec, out, runs)
    return 0


def _write_manifests(spec: RunSpec, out: Path, runs: Path | None) -> None:
    objects = render_site(spec, run_directory(spec, runs))
    require_writable(out, "the folder of the manifests", "name another one with -o")
    path = out / f"{spec.name}.yaml"
    write_atomic(path, yaml.safe_dump_all(objects, sort_keys=False).encode(), mode=0o600)
    print(f"{len(objects)} objects are in {path}, private keys among them: keep it from others.")
    print(f"Start the run: kubectl apply --server-side -f {path}")
    for secret in spec.secrets[:1]:
        name = objects[-1]["metadata"]["name"]
        print(f"Before that, make the Secret {name}-env, with {secret.source.env} and so on.")


def _words(files: SpecFiles, runs: Path | None) -> list[str]:
    """The spec and its options, from whatever folder the script is submitted."""
    words = [str(files.path.absolute())]
    words += [] if files.profile is None else ["--profile", files.profile]
    words += [] if files.placement is None else ["--placement", str(files.placement.absolute())]
    words += [] if runs is None else ["--runs-dir", str(runs.absolute())]
    return [*words, *(word for value in files.overrides for word in ("--set", value))]
