"""`runspec lint`: shows findings and counts them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from runspec.common.errors import UserError

EXIT_CLEAN, EXIT_FINDINGS, EXIT_UNREADABLE = 0, 1, 2


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
    baseline: Path | None
    write_baseline: bool


def lint_command(options: LintOptions) -> int:
    """Prints each finding with its line; returns the exit code. Warnings alone exit 0."""
    from runspec.lint.check import check_files
    from runspec.spec.findings import format_finding
    from runspec.spec.load import SpecFiles

    specs = [
        SpecFiles(path, options.profile, options.placement, options.overrides)
        for path in options.files
    ]
    try:
        findings = check_files(specs)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNREADABLE
    for finding in findings:
        print(format_finding(finding))
    errors = sum(finding.severity == "error" for finding in findings)
    if findings:
        print(f"{errors} errors, {len(findings) - errors} warnings", file=sys.stderr)
    return EXIT_FINDINGS if errors else EXIT_CLEAN
