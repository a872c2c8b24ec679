"""Checks specs: findings of the loader and of the rules, less the suppressed ones.

Comments `# runspec: ignore[CODE, ...] reason="..."` suppress findings. A suppression removes the
findings of its codes in the lines that it is about (`runspec.core.schema.findings.find_comments`).
It needs a reason. Blocking findings, which keep the layers from making a spec, cannot be
suppressed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from operator import attrgetter
from typing import get_args

import runspec.lint.rules  # noqa: F401  (registers them)
from runspec.core.errors import UserError
from runspec.core.schema.findings import Comment, Edit, Finding, replacing
from runspec.core.schema.layers import ParsedFiles, profile_path
from runspec.core.schema.load import VARIABLE, Layered, SpecFiles, load_layers
from runspec.core.schema.schema_fields import close_match
from runspec.core.schema.validate import locate, to_python
from runspec.lint import RULES, Context, Group, violations

_in_order = attrgetter("file", "line", "column", "code", "path", "message")


@dataclass(frozen=True)
class CheckedSpec(Layered):
    """A spec, and its findings that are not suppressed.

    A spec with errors must not run: `require` refuses it.
    """

    suppressed: Sequence[Suppressed] = ()


@dataclass(frozen=True)
class Unreadable:
    """A spec whose files cannot be read."""

    file: str
    error: UserError


@dataclass(frozen=True)
class CheckedFiles:
    """Findings of several specs, in order of file, line and column."""

    files: Sequence[str]
    """Paths of the specs."""
    findings: Sequence[Finding]
    suppressed: Sequence[Suppressed] = ()
    unreadable: Sequence[Unreadable] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    """Text of every file that was read, by path."""

    def count(self, severity: str) -> int:
        """Return how many findings have a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def only(self, codes: Container[str]) -> CheckedFiles:
        """Return the findings of some rules, and the blocking ones."""
        return replace(
            self,
            findings=[f for f in self.findings if f.blocking or f.code in codes],
            suppressed=[one for one in self.suppressed if one.finding.code in codes],
        )


LEAST_HIDDEN = 8
"""Least number of characters of a variable's value that no finding repeats."""


def check_spec(files: SpecFiles, *, environ: Mapping[str, str] | None = None) -> CheckedSpec:
    """Load a spec and check it by every rule.

    Args:
        files: the layers to load.
        environ: the variables for `${VAR}`; the process's environment if None.

    Raises:
        UserError: as `load_layers`.
    """
    linted = _lint(files, environ, {})
    found = {"findings": [*linted.findings, *unused(linted.judged, linted.used)]}
    return CheckedSpec(**{**vars(linted.layered), **found}, suppressed=linted.suppressed)


def check_files(specs: Sequence[SpecFiles]) -> CheckedFiles:
    """Check several specs in one pass.

    A finding in a file that several of them extend is listed once. A suppression is unused if none
    of them uses it.
    """
    parsed: ParsedFiles = {}
    linted, unreadable = [], []
    for files in specs:
        try:
            linted.append(_lint(files, None, parsed))
        except UserError as error:
            unreadable.append(Unreadable(str(files.path), error))
    used = {pair for one in linted for pair in one.used}
    judged = dict.fromkeys(suppression for one in linted for suppression in one.judged)
    findings = {finding for one in linted for finding in one.findings}
    return CheckedFiles(
        [str(files.path) for files in specs],
        sorted({*findings, *unused(judged, used)}, key=_in_order),
        sorted(
            {suppressed for one in linted for suppressed in one.suppressed},
            key=lambda suppressed: _in_order(suppressed.finding),
        ),
        unreadable,
        {file: text for one in linted for file, text in one.layered.texts.items()},
    )


@dataclass(frozen=True)
class _Linted:
    """Findings of one spec, before unused suppressions are known."""

    layered: Layered
    findings: list[Finding]
    """Findings that are not suppressed."""
    suppressed: list[Suppressed]
    used: set[tuple[Suppression, str]]
    """Pairs of a suppression and a code that it removed."""
    judged: list[Suppression]
    """Suppressions that this spec should use."""


def _lint(files: SpecFiles, environ: Mapping[str, str] | None, parsed: ParsedFiles) -> _Linted:
    layered = load_layers(files, environ=environ, parsed=parsed)
    findings = list(layered.findings)
    if layered.spec is not None:
        findings += _rule_findings(layered, Context(layered.spec, files))
    known = os.environ if environ is None else environ
    names = {name for text in layered.texts.values() for name, _ in VARIABLE.findall(text)}
    values = {name: known.get(name, "") for name in sorted(names)}
    values = {name: value for name, value in values.items() if len(value) >= LEAST_HIDDEN}
    findings = [_completed(finding, values) for finding in findings]
    comments = [comment for found in layered.comments.values() for comment in found]
    suppressions, faults = read_suppressions(comments)
    linted = _Linted(layered, [], [], set(), [])
    for finding in findings:
        covering = [one for one in suppressions if one.covers(finding)]
        if covering:
            linted.suppressed.append(Suppressed(finding, covering[0].reason))
            linted.used.update((one, finding.code) for one in covering)  # each counts as used
        else:
            linted.findings.append(finding)
    linted.findings.extend(faults)
    # A suppression in a lower layer may serve another spec. With overrides the findings are not
    # those of the files alone, and without a spec no rule has run.
    profile = profile_path(files.path, files.profile) if files.profile is not None else None
    top = str(files.placement or profile or files.path)
    complete = layered.spec is not None and not files.overrides
    linted.judged.extend(one for one in suppressions if complete and one.comment.place.file == top)
    return linted


def _completed(finding: Finding, values: Mapping[str, str]) -> Finding:
    """Return the finding with a suggestion, and names of variables in place of their values.

    One without a suggestion gets that of its rule.

    A spec may be a stranger's, as in CI, and name a variable that holds a secret of this machine's.
    The beginning of a value, which a message may have cut off, is replaced too.

    Args:
        finding: of the spec.
        values: of the variables that its files use, by name.
    """

    def hidden(text: str) -> str:
        for name, value in values.items():
            shown = f"${{{name}}}"
            for written in (value, repr(value)[1:-1]):
                at = 0
                while (at := text.find(written[:LEAST_HIDDEN], at)) >= 0:
                    alike = takewhile(
                        lambda pair: pair[0] == pair[1], zip(text[at:], written, strict=False)
                    )
                    text = text[:at] + shown + text[at + len([*alike]) :]
                    at += len(shown)
        return text

    field = re.sub(r"(\.\d+)+$", "", finding.path)  # an item of a plain list stands for the list
    hint = finding.suggestion or RULES[finding.code].suggestion.format(path=field)
    return replace(finding, message=hidden(finding.message), suggestion=hidden(hint))


def _rule_findings(layered: Layered, context: Context) -> Iterator[Finding]:
    found = list(violations(context))
    secrets = [
        str(to_python(locate(layered.tree, violation.location)[2]))
        for _, violation in found
        if violation.secret
    ]
    for rule, violation in found:
        if any(secret in violation.message for secret in secrets):
            continue  # it is reported once the secret is removed
        place = locate(layered.tree, violation.location)[0]
        yield Finding(
            replace(place, source="") if violation.secret else place,
            rule.code,
            violation.message,
            path=".".join(str(step) for step in violation.location),
            severity=violation.severity or rule.severity,
            numbers=violation.numbers,
            requires=rule.summary,
            suggestion=violation.suggestion,
        )


def selection(select: Sequence[str], ignore: Sequence[str]) -> frozenset[str]:
    """Return the codes of the rules of `--select` (all if empty), less those of `--ignore`.

    Args:
        select: codes and groups; a text may hold several, with commas between.
        ignore: as `select`.

    Raises:
        UserError: a word is neither a code nor a group.
    """
    chosen = _codes(select, "--select") if select else set(RULES)
    return frozenset(chosen - _codes(ignore, "--ignore"))


def _codes(texts: Iterable[str], option: str) -> set[str]:
    groups = get_args(Group)
    found: set[str] = set()
    for word in (part.strip() for text in texts for part in text.split(",")):
        if word in RULES:
            found.add(word)
        elif word in groups:
            found |= {code for code, rule in RULES.items() if rule.group == word}
        else:
            match = close_match(word, [*RULES, *groups])
            raise UserError(
                f"no rule or group {word[:80]!r}" + (f"; did you mean {match}?" if match else ""),
                place=option,
                remedy=f"name a code of `runspec explain --list`, or one of: {', '.join(groups)}",
            )
    return found


MALFORMED, REASON = "malformed-suppression", "suppression-reason"
UNKNOWN, UNUSED = "unknown-rule", "unused-suppression"
OF_MACHINES = {"model-path"}
"""Codes of rules that find on one machine what they do not find on another."""
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


def unused(
    suppressions: Iterable[Suppression], used: set[tuple[Suppression, str]]
) -> list[Finding]:
    """Return a finding for each suppression with a code that removes nothing."""
    findings = []
    for suppression in suppressions:
        needed = OF_MACHINES | {code for by, code in used if by == suppression}
        idle = [code for code in suppression.codes if code not in needed]
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
