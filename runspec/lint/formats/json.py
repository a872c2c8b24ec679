"""For programs: one JSON object, whose `version` changes when a key of it does."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

from runspec.core.spec.findings import Finding, Number
from runspec.lint.check import CheckedFiles
from runspec.lint.registry import RULES

VERSION = 2


def render(checked: CheckedFiles) -> str:
    """Keys: version, files, findings, suppressed (findings with a reason), unreadable,
    summary.

    Columns count characters from 1; `end_column` is the first one behind what the finding is about.
    """
    content = {
        "version": VERSION,
        "files": list(checked.files),
        "findings": [_finding(finding) for finding in checked.findings],
        "suppressed": [
            {**_finding(one.finding), "reason": one.reason} for one in checked.suppressed
        ],
        "unreadable": [
            {"file": one.file, "message": one.error.thing, "remedy": one.error.remedy}
            for one in checked.unreadable
        ],
        "summary": {"errors": checked.count("error"), "warnings": checked.count("warning")},
    }
    return json.dumps(content, indent=2, allow_nan=False)


def _finding(finding: Finding) -> dict[str, Any]:
    rule = RULES[finding.code]
    return {
        "code": finding.code,
        "group": rule.group,
        "rule": rule.summary,
        "severity": finding.severity,
        "path": finding.path,
        "message": finding.message,
        "file": finding.file,
        "line": finding.line,
        "column": finding.column,
        "end_column": finding.column + finding.width,
        "source": finding.line_text,
        "numbers": finite(finding),
        "requires": finding.requires,
        "suggestion": finding.suggestion,
        "fix": None if finding.fix is None else asdict(finding.fix),
        "blocking": finding.blocking,
    }


def finite(finding: Finding) -> dict[str, Number]:
    """What was measured; infinity and NaN, which JSON has not, as text."""
    return {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in finding.numbers.items()
    }
