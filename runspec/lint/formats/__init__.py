"""How findings are written for people, for CI systems and for programs: one module a format.

Each has `render(report: Report) -> str`, text without a line end at its end.
"""

from __future__ import annotations

FORMATS = ("pretty", "compact", "json", "github", "sarif")
FOR_PEOPLE = ("pretty", "compact")
