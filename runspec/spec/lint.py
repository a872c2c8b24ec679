"""`runspec lint`: the findings of many specs, each once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runspec.spec.findings import Finding
from runspec.spec.load import load_spec


def lint_files(
    paths: Sequence[Path], *, profile: str | None = None, overrides: Sequence[str] = ()
) -> list[Finding]:
    """Findings of every spec, each once, in order of file, line and column.

    A finding in a file that several specs extend is named once. Show them with
    `findings.format_finding`.

    Raises:
        UserError: as `load_spec`: a file that cannot be read, or bad usage.
    """
    findings = {
        finding
        for path in paths
        for finding in load_spec(path, profile=profile, overrides=overrides).findings
    }
    return sorted(findings, key=lambda f: (f.file, f.line, f.column, f.code, f.path))
