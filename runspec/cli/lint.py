"""`runspec lint`: checks specs, mends what is safe to mend, and says the rest in a format.

Exit codes: 0 nothing at or above the fail level; 1 a finding; 2 a file that cannot be read, or bad
usage, whatever was found in the others. A fault of our own goes through to `main`, which exits 3.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import get_args

from runspec.core.errors import UserError
from runspec.core.spec.load import SpecFiles
from runspec.lint.check import CheckedFiles, Unreadable, check_files
from runspec.lint.formats import FOR_PEOPLE, FORMATS
from runspec.lint.report import FailLevel, Report
from runspec.lint.select import Selection, selection

EXIT_CLEAN, EXIT_FINDINGS, EXIT_UNREADABLE = 0, 1, 2
MAX_ROUNDS = 5
"""A mended key can bring its value to light, which has a mend of its own, and so on."""


@dataclass(frozen=True)
class LintOptions:
    """What the command line says."""

    files: Sequence[Path]
    profile: str | None
    placement: Path | None
    overrides: Sequence[str]
    fix: bool
    select: Sequence[str]
    ignore: Sequence[str]
    output: str
    fail_level: str


def lint_command(options: LintOptions) -> int:
    """Prints what is wrong with specs; returns the exit code."""
    try:
        return _lint(options)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNREADABLE


def _lint(options: LintOptions) -> int:
    _check_usage(options)
    chosen = selection(options.select, options.ignore)
    checked = _check(options)
    if options.fix:
        checked = _fixed(checked, chosen, options)
    report = _report(checked, chosen, options)
    _print(report, options.output)
    if report.unreadable:
        return EXIT_UNREADABLE
    return EXIT_FINDINGS if any(map(report.fails, report.findings)) else EXIT_CLEAN


def _check_usage(options: LintOptions) -> None:
    for option, value, known in (
        ("--format", options.output, FORMATS),
        ("--fail-level", options.fail_level, get_args(FailLevel)),
    ):
        if value not in known:
            remedy = f"choose one of: {', '.join(known)}"
            raise UserError(f"there is no {value[:80]!r}", place=option, remedy=remedy)


def _check(options: LintOptions) -> CheckedFiles:
    return check_files(
        [
            SpecFiles(path, options.profile, options.placement, tuple(options.overrides))
            for path in options.files
        ]
    )


def _fixed(checked: CheckedFiles, chosen: Selection, options: LintOptions) -> CheckedFiles:
    """Writes what can be mended and checks again, until nothing more can be."""
    from runspec.lint.fix import mend, write_mended

    for _ in range(MAX_ROUNDS):
        mended = mend([f for f in checked.findings if chosen.takes(f)], checked.texts)
        for file, why in mended.refused.items():
            print(f"not mended: {file}: {why}", file=sys.stderr)
        if not mended.texts:
            break
        write_mended(mended, checked.texts)
        for finding in mended.findings:
            print(f"mended: {finding}", file=sys.stderr)
        checked = _check(options)
    return checked


def _report(checked: CheckedFiles, chosen: Selection, options: LintOptions) -> Report:
    findings = [finding for finding in checked.findings if chosen.takes(finding)]
    suppressed = [one for one in checked.suppressed if chosen.takes(one.finding)]
    level = next(level for level in get_args(FailLevel) if level == options.fail_level)
    return Report(checked.files, findings, suppressed, checked.unreadable, level)


def _print(report: Report, output: str) -> None:
    module = import_module(f"runspec.lint.formats.{output}")
    text = (
        module.render(report, colour=_has_colour()) if output == "pretty" else module.render(report)
    )
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file's text may be beyond the terminal's
        sys.stdout.reconfigure(errors="backslashreplace")
    if text:
        print(text)
    _say_unreadable(report.unreadable)
    if output in FOR_PEOPLE:
        _summarise(report)


def _has_colour() -> bool:
    """See https://no-color.org."""
    return sys.stdout is not None and sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _say_unreadable(unreadable: Sequence[Unreadable]) -> None:
    for message in dict.fromkeys(str(one.error) for one in unreadable):
        print(f"error: {message}", file=sys.stderr)


def _summarise(report: Report) -> None:
    said = [_counted(report.count("error"), "error"), _counted(report.count("warning"), "warning")]
    if report.suppressed:
        said.append(f"{len(report.suppressed)} suppressed")
    if report.findings or len(said) > 2:
        print(", ".join(said), file=sys.stderr)


def _counted(count: int, one: str) -> str:
    return f"{count} {one if count == 1 else one + 's'}"
