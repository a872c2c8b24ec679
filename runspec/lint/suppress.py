"""Suppressions: comments `# runspec: ignore[CODE, ...] reason="..."` that accept findings.

A suppression removes the findings of its codes in the lines that it is about
(`runspec.core.spec.findings.find_comments`). It needs a reason. Blocking findings, which keep the
layers from making a spec, cannot be suppressed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from runspec.core.spec.findings import Comment, Edit, Finding, replacing
from runspec.core.spec.schema_fields import close_match
from runspec.lint.registry import RULES

MALFORMED, REASON = "malformed-suppression", "suppression-reason"
UNKNOWN, UNUSED = "unknown-rule", "unused-suppression"
FORM = 'runspec: ignore[CODE] reason="..."'
_FORM = r'#[ \t]*runspec:[ \t]*ignore\[([^\[\]]*)\](?:[ \t]+reason="([^"]*)")?[ \t]*'
_CODE = r"[^\s,]+"


@dataclass(frozen=True)
class Suppression:
    """A valid suppression."""

    comment: Comment
    codes: tuple[str, ...]
    """Codes of known rules."""
    reason: str

    def covers(self, finding: Finding) -> bool:
        comment = self.comment
        return (
            not finding.blocking
            and finding.code in self.codes
            and finding.file == comment.place.file
            and comment.first <= finding.line <= comment.last
        )


@dataclass(frozen=True)
class Suppressed:
    """A suppressed finding and the reason."""

    finding: Finding
    reason: str


@dataclass(frozen=True)
class Applied:
    """Findings of a spec after suppression."""

    findings: list[Finding]
    suppressed: list[Suppressed]
    used: set[tuple[Suppression, str]]
    """Pairs of a suppression and a code that it removed."""


def read_suppressions(comments: Iterable[Comment]) -> tuple[list[Suppression], list[Finding]]:
    """Return the valid suppressions among comments, and findings about the others."""
    suppressions: list[Suppression] = []
    findings: list[Finding] = []
    for comment in comments:
        match = re.fullmatch(_FORM, comment.text)
        codes = list(re.finditer(_CODE, match[1])) if match else []
        if match is None or not codes:
            message, form = f"{comment.text[:80]!r} is no suppression", f"# {FORM}"
            findings.append(
                Finding(comment.place, MALFORMED, message, severity="warning", suggestion=form)
            )
            continue
        offset = comment.place.column + match.start(1)
        for code in codes:
            if code[0] not in RULES:
                place = replace(comment.place, column=offset + code.start(), width=len(code[0]))
                close = close_match(code[0], RULES)
                hint = f"did you mean {close}?" if close else "`runspec explain --list` lists them"
                fix = replacing(place, close) if close else None
                message = f"no rule {code[0][:80]!r}"
                findings.append(Finding(place, UNKNOWN, message, suggestion=hint, fix=fix))
        known = tuple(dict.fromkeys(code[0] for code in codes if code[0] in RULES))
        reason = (match[2] or "").strip()
        if not reason:
            message = "a suppression without a reason counts for nothing"
            findings.append(Finding(comment.place, REASON, message, suggestion='add reason="..."'))
        elif known:
            suppressions.append(Suppression(comment, known, reason))
    return suppressions, findings


def apply_suppressions(suppressions: Sequence[Suppression], findings: Iterable[Finding]) -> Applied:
    """Remove suppressed findings; if several suppressions cover one, each counts as used."""
    applied = Applied([], [], set())
    for finding in findings:
        covering = [one for one in suppressions if one.covers(finding)]
        if covering:
            applied.suppressed.append(Suppressed(finding, covering[0].reason))
            applied.used.update((one, finding.code) for one in covering)
        else:
            applied.findings.append(finding)
    return applied


def unused(
    suppressions: Iterable[Suppression], used: set[tuple[Suppression, str]]
) -> list[Finding]:
    """Return a finding for each suppression with a code that removes nothing."""
    findings = []
    for suppression in suppressions:
        idle = [code for code in suppression.codes if (suppression, code) not in used]
        if idle:
            place = suppression.comment.place
            message = f"nothing of {', '.join(idle)} is found here"
            fix = _without(suppression, idle)
            findings.append(
                Finding(place, UNUSED, message, severity="warning", suggestion="remove it", fix=fix)
            )
    return findings


def _without(suppression: Suppression, idle: Sequence[str]) -> Edit | None:
    """Return an edit that removes codes, or the whole comment; None if a code is unknown."""
    place, text = suppression.comment.place, suppression.comment.text
    start, end = text.index("[") + 1, text.index("]")
    if any(code[0] not in RULES for code in re.finditer(_CODE, text[start:end])):
        return None
    kept = [code for code in suppression.codes if code not in idle]
    if kept:
        first = place.column + start
        return Edit(place.line, first, place.column + end, ", ".join(kept))
    before = place.source[: place.column - 1].rstrip()
    return Edit(place.line, len(before) + 1, len(place.source) + 1, "")
