"""`runspec lint`: shows findings and counts them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from runspec.common.errors import UserError

EXIT_CLEAN, EXIT_FINDINGS, EXIT_UNREADABLE = 0, 1, 2


def lint_command(files: Sequence[Path], profile: str | None, overrides: Sequence[str]) -> int:
    """Prints each finding with its line; returns the exit code. Warnings alone exit 0."""
    from runspec.spec.findings import format_finding
    from runspec.spec.lint import lint_files

    try:
        findings = lint_files(files, profile=profile, overrides=overrides)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_UNREADABLE
    for finding in findings:
        print(format_finding(finding))
    errors = sum(finding.severity == "error" for finding in findings)
    warnings = len(findings) - errors
    if findings:
        print(f"{_count(errors, 'error')}, {_count(warnings, 'warning')}", file=sys.stderr)
    return EXIT_FINDINGS if errors else EXIT_CLEAN


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
