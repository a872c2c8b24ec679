"""How findings are written for people, for CI systems and for programs: one module a format.

Each has `render(checked: CheckedFiles) -> str`, text without a line end at its end.
"""

from __future__ import annotations

import os
from pathlib import Path

FORMATS = ("pretty", "compact", "json", "github", "sarif")
FOR_PEOPLE = ("pretty", "compact")


def from_here(file: str) -> Path:
    """A file's path from the working directory, as given where it lies elsewhere."""
    path = Path(os.path.normpath(file))
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
