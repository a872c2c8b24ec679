"""What `runspec lint` has to say, before any format is given to it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runspec.core.spec.findings import Finding
from runspec.lint.check import Unreadable
from runspec.lint.suppress import Suppressed

FailLevel = Literal["error", "warning", "never"]


@dataclass(frozen=True)
class Report:
    files: Sequence[str]
    """The specs that were asked for."""
    findings: Sequence[Finding]
    """Those that are shown."""
    suppressed: Sequence[Suppressed] = ()
    unreadable: Sequence[Unreadable] = ()
    fail_level: FailLevel = "error"

    def count(self, severity: str) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    def fails(self, finding: Finding) -> bool:
        """Whether a finding alone makes the command exit with 1."""
        return self.fail_level == "warning" or self.fail_level == finding.severity


def from_here(file: str) -> Path:
    """A file's path from the working directory, as given where it lies elsewhere."""
    path = Path(os.path.normpath(file))
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
