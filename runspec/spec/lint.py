"""`runspec lint`: findings over files, and how they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from runspec.spec.findings import Finding


def lint_files(
    paths: Sequence[Path], *, profile: str | None = None, overrides: Sequence[str] = ()
) -> list[Finding]:
    """Findings of every spec, each once, in order of file and line.

    Raises:
        UserError: as `load_spec`: a file that cannot be read, or bad usage.
    """
    raise NotImplementedError


def format_findings(findings: Sequence[Finding], sources: Mapping[str, str]) -> str:
    """Findings as text: the finding, the source line, a caret under the place.

    Args:
        findings: what to show.
        sources: text by file name, as in `LoadedSpec.sources`; files not in it are read from disk.
    """
    raise NotImplementedError
