"""`runspec lint`: checks specs, applies safe fixes, and prints the other findings in a format.

Exit codes: 0 nothing at or above the fail level; 1 a finding; 2 a file that cannot be read, or bad
usage, whatever was found in the others. A fault of our own goes through to `main`, which exits 3.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from runspec.core.errors import bad_usage
from runspec.core.schema.load import SpecFiles
from runspec.lint.check import CheckedFiles, check_files, selection
from runspec.lint.formats import FOR_PEOPLE, render

EXIT_CLEAN, EXIT_FINDINGS, EXIT_UNREADABLE = 0, 1, 2
MAX_ROUNDS = 5
"""A mended key can bring its value to light, which has a mend of its own, and so on."""


@bad_usage()
def lint_command(
    specs: Sequence[SpecFiles],
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    *,
    fix: bool = False,
    data: bool = False,
    output: str = "pretty",
    fail_level: str = "error",
) -> int:
    """Prints what is wrong with specs; returns the exit code.

    Args:
        specs: to check.
        select, ignore: rules and groups.
        fix: mends what is safe to mend.
        data: reads the problems of the specs that have no errors, and tries their graders.
        output: the format.
        fail_level: of findings that make the exit code 1.
    """
    codes = selection(select, ignore)
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
    text = render(checked, output, colour=_has_colour())
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file's text may be beyond the terminal's
        sys.stdout.reconfigure(errors="backslashreplace")
    if text:
        print(text)
    for message in dict.fromkeys(str(one.error) for one in checked.unreadable):
        print(f"error: {message}", file=sys.stderr)
    if output in FOR_PEOPLE:
        _summarise(checked)


def _has_colour() -> bool:
    """See https://no-color.org."""
    return sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _summarise(checked: CheckedFiles) -> None:
    said = [_counted(checked.count(severity), severity) for severity in ("error", "warning")]
    if checked.suppressed:
        said.append(f"{len(checked.suppressed)} suppressed")
    if checked.findings or checked.suppressed:
        print(", ".join(said), file=sys.stderr)


def _counted(count: int, one: str) -> str:
    return f"{count} {one if count == 1 else one + 's'}"
