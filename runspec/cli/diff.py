"""`runspec diff`: the run's spec beside a file's, line by line."""

from __future__ import annotations

import difflib
import sys
from pathlib import Path

import yaml
from rich.console import Console
from rich.text import Text

from runspec.cli.profile_view import with_identities
from runspec.cli.spec_files import located
from runspec.core.errors import UserError, bad_usage
from runspec.core.spec.findings import format_finding
from runspec.core.spec.load import SpecFiles, load_layers
from runspec.core.spec.resolved import FILE_NAME, dump_resolved, load_resolved, parse_resolved
from runspec.core.spec.schema import RunSpec
from runspec.local.anew import STARTS_ANEW, takes_any_change
from runspec.local.run_dir import run_directory
from runspec.plan.changes import difference, of_class

EXIT_SAME, EXIT_DIFFERENT = 0, 1
_STYLES = {"+": "green", "-": "red", "@": "cyan"}


@bad_usage()
def diff_command(files: SpecFiles, runs_dir: Path | None) -> int:
    """Prints the difference as `diff -u` does; returns the exit code."""
    layered = load_layers(files)
    if layered.spec is None:
        found = "\n".join(format_finding(finding) for finding in layered.findings)
        raise UserError(f"no spec to compare:\n{found}", place=str(files.path))
    run_dir = run_directory(layered.spec, runs_dir)
    known = (run_dir / FILE_NAME).exists()
    old = load_resolved(run_dir) if known else None
    new = located(layered.spec, files.path.parent)
    before = _lines(old) if old else []
    there = str(run_dir / FILE_NAME) if known else "/dev/null"
    after = _lines(new)
    lines = list(difflib.unified_diff(before, after, there, str(files.path)))
    console = Console(highlight=False)
    for line in lines:
        # Titles look like added and removed lines: they are told by their place.
        style = "bold" if line in lines[:2] else _STYLES.get(line[0], "")
        console.print(Text(line.rstrip("\n"), style=style), soft_wrap=True)
    if old and of_class(difference(old, new), "newrun") and takes_any_change(run_dir):
        print(STARTS_ANEW, file=sys.stderr)  # no line of the difference
    return EXIT_DIFFERENT if lines else EXIT_SAME


def _lines(spec: RunSpec) -> list[str]:
    """The resolved spec as YAML, every default written out; of profiles, which they are."""
    # Through the form on disk, in which free maps are sorted: their order means nothing.
    on_disk = parse_resolved(dump_resolved(spec), place=FILE_NAME)
    tree = with_identities(on_disk.model_dump(mode="json", by_alias=True))
    return yaml.safe_dump(tree, sort_keys=False, allow_unicode=True).splitlines(keepends=True)
