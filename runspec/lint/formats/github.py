"""GitHub workflow commands: a finding becomes an annotation beside the line of a pull request."""

from __future__ import annotations

from runspec.core.spec.findings import SET_FILE, Finding, measured
from runspec.lint.check import CheckedFiles
from runspec.lint.formats import from_here
from runspec.lint.formats.compact import visible


def render(checked: CheckedFiles) -> str:
    """A command a line, unreadable files first."""
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
