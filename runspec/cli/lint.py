"""`runspec lint`, `lock` and `render`: check a spec, pin what it names, and print it resolved.

Exit codes: 0 nothing at or above the fail level; 1 a finding; 2 a file that cannot be read, or bad
usage, whatever was found in the others. A fault of our own goes through to `main`, which exits 3.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer
import yaml

from runspec import cli
from runspec.core.errors import BadUsage, UserError, bad_usage, remedies_once
from runspec.core.files import require_writable, write_atomic
from runspec.core.schema import RunSpec
from runspec.core.schema.findings import format_finding
from runspec.core.schema.load import SpecFiles, load_layers, origin, origins
from runspec.core.schema.lock_file import LOCK_VERSION, Lock, lock_path, write_lock
from runspec.core.schema.yaml_text import to_yaml
from runspec.lint.check import CheckedFiles, check_files, check_spec, selection
from runspec.lint.formats import FOR_PEOPLE, render

EXIT_CLEAN, EXIT_FINDINGS, EXIT_UNREADABLE = 0, 1, 2
MAX_ROUNDS = 5
"""A mended key can bring its value to light, which has a mend of its own, and so on."""


@bad_usage()
def lint_command(
    files: Annotated[list[Path], typer.Argument(help="Specs to check.")],
    profile: cli.Profile = None,
    placement: cli.Placement = None,
    overrides: cli.Overrides = None,
    fix: Annotated[bool, typer.Option("--fix", help="Mends what is safe to mend.")] = False,
    data: Annotated[
        bool, typer.Option("--data", help="Reads every problem and tries the graders, too.")
    ] = False,
    select: Annotated[
        list[str] | None, typer.Option(help="Only these rules or groups, comma-separated.")
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(help="Not these rules or groups, comma-separated.")
    ] = None,
    output: Annotated[
        Literal["pretty", "compact", "json", "github", "sarif"], typer.Option("--format")
    ] = "pretty",
    fail_level: Annotated[
        Literal["error", "warning", "never"], typer.Option(help="Exits 1 at or above.")
    ] = "error",
) -> int:
    """Prints what is wrong with specs; returns the exit code.

    With `data` it reads the problems of the specs that have no errors, and tries their graders.
    """
    specs = [cli.files_named(path, profile, placement, overrides) for path in files]
    codes = selection(select or [], ignore or [])
    checked = check_files(specs).only(codes)
    if fix:
        checked = _fixed(checked, codes, specs)
    if data:
        from runspec.cli.checks import with_problems

        checked = with_problems(checked, specs)
    _print(checked, output)
    if checked.unreadable:
        return EXIT_UNREADABLE
    failing = {"error": ("error",), "warning": ("error", "warning"), "never": ()}[fail_level]
    failed = any(finding.severity in failing for finding in checked.findings)
    return EXIT_FINDINGS if failed else EXIT_CLEAN


def _fixed(
    checked: CheckedFiles, codes: frozenset[str], specs: Sequence[SpecFiles]
) -> CheckedFiles:
    """Writes what can be mended and checks again, until nothing more can be."""
    from runspec.lint.formats import fix_texts, write_fixed

    for _ in range(MAX_ROUNDS):
        fixed = fix_texts(checked.findings, checked.texts)
        for file, why in fixed.refused.items():
            print(f"not mended: {file}: {why}", file=sys.stderr)
        if not fixed.texts:
            break
        write_fixed(fixed, checked.texts)
        for finding in fixed.findings:
            print(f"mended: {finding}", file=sys.stderr)
        checked = check_files(specs).only(codes)
    return checked


def _print(checked: CheckedFiles, output: str) -> None:
    """Print the findings in a format, and for people their number; colours are as no-color.org has
    them."""
    colour = sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    text = render(checked, output, colour=colour)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file's text may be beyond the terminal's
        sys.stdout.reconfigure(errors="backslashreplace")
    if text:
        print(text)
    errors = list({str(one.error): one.error for one in checked.unreadable}.values())
    remedies = remedies_once([error.remedy for error in errors])
    for error, remedy in zip(errors, remedies, strict=True):
        print(f"error: {UserError(error.thing, place=error.place, remedy=remedy)}", file=sys.stderr)
    if output in FOR_PEOPLE and (checked.findings or not checked.unreadable):
        counts = {each: checked.count(each) for each in ("error", "warning")}
        said = [f"{count} {each}{'s' if count != 1 else ''}" for each, count in counts.items()]
        if checked.suppressed:
            said.append(f"{len(checked.suppressed)} suppressed")
        print(", ".join(said), file=sys.stderr)


@bad_usage()
def lock_command(
    file: cli.File,
    profile: cli.Profile = None,
    placement: cli.Placement = None,
    overrides: cli.Overrides = None,
    check: Annotated[
        bool, typer.Option("--check", help="Writes nothing; exits 1 where the lock is stale.")
    ] = False,
) -> int:
    """Writes the lock beside the spec, or says what is stale in it; returns the exit code.

    The spec must fit the schema; its rules may complain, for one of them asks for this lock.
    """
    files = cli.files_named(file, profile, placement, overrides)
    layered = load_layers(files)
    if layered.kind != "Run":
        what = f"a file of kind {layered.kind} names nothing to pin"
        raise UserError(what, place=str(files.path), remedy="lock a spec")
    if layered.spec is None:
        for finding in layered.findings:
            print(format_finding(finding), file=sys.stderr)
        return EXIT_FINDINGS
    return _check_lock(layered.spec, files) if check else _write_lock(layered.spec, files)


def _check_lock(spec: RunSpec, files: SpecFiles) -> int:
    """Print what is stale in the lock; return the exit code."""
    from runspec.lock import check_lock

    path = lock_path(files.path, files.profile)
    if not path.is_file():
        print(f"{path} is not there: make it with `runspec lock`")
        return EXIT_FINDINGS
    stale = check_lock(spec, files.path, files.profile)
    for sentence in stale:
        print(sentence)
    if not stale:
        print(f"{path} holds")
    return EXIT_FINDINGS if stale else 0


def _write_lock(spec: RunSpec, files: SpecFiles) -> int:
    """Write the lock, or print what cannot be pinned; return the exit code."""
    from runspec.lock import find_pins

    seen = find_pins(spec, files.path.parent, os.environ)
    problems = {**seen.unknown, **seen.absent}
    if problems:
        for path, what in problems.items():
            print(f"error: {path}: {what}", file=sys.stderr)
        print("nothing was written: a lock pins everything or is none", file=sys.stderr)
        return EXIT_FINDINGS
    for path, what in seen.open.items():
        print(f"warning: {path}: {what}", file=sys.stderr)
    lock = Lock(version=LOCK_VERSION, pins=seen.pins)
    print(f"wrote {write_lock(lock, files.path, files.profile)}")
    return 0


def render_command(
    file: cli.File,
    profile: cli.Profile = None,
    placement: cli.Placement = None,
    overrides: cli.Overrides = None,
    show_origin: Annotated[
        bool, typer.Option("--show-origin", help="Says of each value where it is from.")
    ] = False,
    output: Annotated[Literal["yaml", "json"], typer.Option("--format")] = "yaml",
    backend: Annotated[
        Literal["kubernetes", "slurm"] | None,
        typer.Option("--backend", help="Writes what starts the run there."),
    ] = None,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Where --backend writes.")] = None,
    runs_dir: cli.SpecRunsDir = None,
) -> int:
    """Prints the spec, or writes what starts it on a cluster; returns the exit code."""
    files = cli.files_named(file, profile, placement, overrides)
    if backend is not None:
        return _write_for(files, backend, out, runs_dir)
    return _print_resolved(files, show_origin, output)


@bad_usage()
def _print_resolved(files: SpecFiles, show_origin: bool, output: str) -> int:
    """Prints the spec that the layers make, every default written out; returns the exit code.

    Secrets are there by the names of their variables, as in the spec itself.
    """
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


def _write_for(
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
    from runspec.backends import sbatch_script
    from runspec.backends.kubernetes.render import render_site
    from runspec.cli.checks import sound_spec
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
        script = sbatch_script(spec, cli.words_of(there, runs and runs.absolute()), run_dir)
        require_writable(out.absolute().parent, "the script's folder", "name another file with -o")
        write_atomic(out, script.encode())
        print(f"Start the run, and continue it: sbatch {out}")
    else:
        objects, path = render_site(spec, run_dir), out / f"{spec.name}.yaml"
        require_writable(out, "the folder of the manifests", "name another one with -o")
        write_atomic(path, yaml.safe_dump_all(objects, sort_keys=False).encode(), mode=0o600)
        print(
            f"{len(objects)} objects are in {path}, private keys among them: keep it from others."
        )
        print(f"Start the run: kubectl apply --server-side -f {path}")
        for secret in spec.secrets[:1]:
            name = objects[-1]["metadata"]["name"]
            print(f"Before that, make the Secret {name}-env, with {secret.source.env} and so on.")
    return 0
