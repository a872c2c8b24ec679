"""`runspec lint`: checks specs, applies safe fixes, and prints the other findings in a format.

Exit codes: 0 nothing at or above the fail level; 1 a finding; 2 a file that cannot be read, or bad
usage, whatever was found in the others. A fault of our own goes through to `main`, which exits 3.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import typer

from runspec.cli import options
from runspec.core.errors import bad_usage
from runspec.core.spec.load import SpecFiles
from runspec.lint.check import CheckedFiles, check_files, selection
from runspec.lint.formats import FOR_PEOPLE, render

EXIT_CLEAN, EXIT_FINDINGS, EXIT_UNREADABLE = 0, 1, 2
MAX_ROUNDS = 5
"""A mended key can bring its value to light, which has a mend of its own, and so on."""


@bad_usage()
def lint_command(
    files: Annotated[list[Path], typer.Argument(help="Specs to check.")],
    profile: options.Profile = None,
    placement: options.Placement = None,
    overrides: options.Overrides = None,
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
    specs = [options.files_named(path, profile, placement, overrides) for path in files]
    codes = selection(select or [], ignore or [])
    checked = check_files(specs).only(codes)
    if fix:
        checked = _fixed(checked, codes, specs)
    if data:
        from runspec.cli.doctor import with_problems

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
    from runspec.lint.fix import fix_texts, write_fixed

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
    colour = sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    text = render(checked, output, colour=colour)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file's text may be beyond the terminal's
        sys.stdout.reconfigure(errors="backslashreplace")
    if text:
        print(text)
    for message in dict.fromkeys(str(one.error) for one in checked.unreadable):
        print(f"error: {message}", file=sys.stderr)
    if output in FOR_PEOPLE and (checked.findings or checked.suppressed):
        counts = {each: checked.count(each) for each in ("error", "warning")}
        said = [f"{count} {each}{'s' if count != 1 else ''}" for each, count in counts.items()]
        if checked.suppressed:
            said.append(f"{len(checked.suppressed)} suppressed")
        print(", ".join(said), file=sys.stderr)
