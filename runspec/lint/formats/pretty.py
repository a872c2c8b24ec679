"""For people: each finding with its line, carets, what was measured, what would have to hold."""

from __future__ import annotations

from runspec.core.spec.findings import Finding, excerpt, measured
from runspec.lint.check import CheckedFiles
from runspec.lint.formats.compact import visible

_BOLD, _RED, _YELLOW, _CYAN, _GREEN = "1", "31;1", "33;1", "36", "32"
_SEVERITY = {"error": _RED, "warning": _YELLOW}


def render(checked: CheckedFiles, *, colour: bool = False) -> str:
    """All findings, an empty line between two."""
    return "\n\n".join(_finding(finding, colour) for finding in checked.findings)


def _finding(finding: Finding, colour: bool) -> str:
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
