"""Output of findings for people (pretty, compact), CI systems (github, sarif) and programs (json).

github writes workflow commands: each finding becomes an annotation on its line in a pull request.
json is one object whose `version` changes whenever one of its keys does. `runspec.lint.sarif`
writes sarif.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from runspec.core.spec.findings import SET_FILE, Finding, excerpt, finite, from_here, measured
from runspec.lint.check import CheckedFiles
from runspec.lint.registry import RULES

FORMATS = ("pretty", "compact", "json", "github", "sarif")
FOR_PEOPLE = ("pretty", "compact")
JSON_VERSION = 2
_BOLD, _RED, _YELLOW, _CYAN, _GREEN = "1", "31;1", "33;1", "36", "32"
_SEVERITY = {"error": _RED, "warning": _YELLOW}


def render(checked: CheckedFiles, output: str, *, colour: bool = False) -> str:
    """Return findings as text without a final line end.

    Args:
        checked: what to show.
        output: one of FORMATS.
        colour: whether `pretty` uses the terminal's colours.
    """
    if output == "pretty":
        return "\n\n".join(_pretty_finding(finding, colour) for finding in checked.findings)
    if output == "compact":
        return "\n".join(visible(str(finding)) for finding in checked.findings)
    if output == "json":
        return _json(checked)
    if output == "github":
        return _github(checked)
    from runspec.lint import sarif  # imported on demand, for a quick start

    return sarif.render(checked)


def visible(text: str) -> str:
    """Return a line that is safe for a terminal: control characters become escapes."""
    return "".join(
        char if char == "\t" or char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def _pretty_finding(finding: Finding, colour: bool) -> str:
    place = f"{finding.file}:{finding.line}:{finding.column}:"
    path = f"{finding.path}: " if finding.path else ""
    severity = _painted(f"{finding.severity} {finding.code}:", _SEVERITY[finding.severity], colour)
    head = f"{_painted(visible(place), _BOLD, colour)} {severity} {visible(path + finding.message)}"
    lines = [head]
    if finding.source.strip():
        line, carets = excerpt(finding).split("\n")
        lines += [visible(line), _painted(carets, _SEVERITY[finding.severity], colour)]
    margin = " " * (len(str(finding.line)) + 2)
    notes = [_painted(visible(text), _CYAN, colour) for text in measured(finding)]
    if finding.suggestion:
        fixable = "  [--fix]" if finding.fix is not None else ""
        hint = f"suggestion: {finding.suggestion}{fixable}"
        notes.append(_painted(visible(hint), _GREEN, colour))
    return "\n".join([*lines, *(f"{margin}= {note}" for note in notes)])


def _painted(text: str, style: str, colour: bool) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if colour else text


def _json(checked: CheckedFiles) -> str:
    """Keys: version, files, findings, suppressed (with a reason), unreadable, summary.

    Columns count characters from 1; `end_column` is exclusive.
    """
    content = {
        "version": JSON_VERSION,
        "files": list(checked.files),
        "findings": [_json_finding(finding) for finding in checked.findings],
        "suppressed": [
            {**_json_finding(one.finding), "reason": one.reason} for one in checked.suppressed
        ],
        "unreadable": [
            {"file": one.file, "message": one.error.thing, "remedy": one.error.remedy}
            for one in checked.unreadable
        ],
        "summary": {"errors": checked.count("error"), "warnings": checked.count("warning")},
    }
    return json.dumps(content, indent=2, allow_nan=False)


def _json_finding(finding: Finding) -> dict[str, Any]:
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


def _github(checked: CheckedFiles) -> str:
    """Return one command a line, unreadable files first."""
    lines = [
        f"::error {_properties(file=from_here(one.file).as_posix())}::{_data(one.error.thing)}"
        for one in checked.unreadable
    ]
    return "\n".join([*lines, *(_command(finding) for finding in checked.findings)])


def _command(finding: Finding) -> str:
    properties: dict[str, object] = {"title": f"runspec {finding.code}"}
    if finding.file != SET_FILE:
        properties |= {
            "file": from_here(finding.file).as_posix(),
            "line": finding.line,
            "col": finding.column,
        }
        if finding.width:
            properties["endColumn"] = finding.column + finding.width
    path = f"{finding.path}: " if finding.path else ""
    hint = [finding.suggestion] if finding.suggestion else []
    text = "\n".join([f"{path}{finding.message}", *measured(finding), *hint])
    return f"::{finding.severity} {_properties(**properties)}::{_data(text)}"


def _properties(**properties: object) -> str:
    return ",".join(f"{key}={_property(str(value))}" for key, value in properties.items())


def _data(text: str) -> str:
    lines = (visible(line) for line in text.replace("%", "%25").split("\n"))
    return "%0A".join(lines)


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
