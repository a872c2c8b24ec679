"""A spec from its files, checked: the loader's findings and the rules', in one pass."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import runspec.lint.rules  # noqa: F401  (registers them)
from runspec.core.errors import UserError
from runspec.core.spec.findings import Finding
from runspec.core.spec.layers import ParsedFiles, profile_path
from runspec.core.spec.load import Layered, SpecFiles, load_layers, required_spec
from runspec.core.spec.schema import RunSpec
from runspec.core.spec.validate import locate, to_python
from runspec.lint.registry import RULES, Context, violations
from runspec.lint.suppress import (
    Applied,
    Suppressed,
    Suppression,
    apply_suppressions,
    read_suppressions,
    unused,
)


@dataclass(frozen=True)
class CheckedSpec:
    """A spec and what is wrong with it.

    `spec` is None when the layers do not make a `RunSpec`; a spec with errors among its findings
    must not run (`require` sees to that).
    """

    spec: RunSpec | None
    findings: list[Finding]
    """Those that no suppression takes away."""
    layered: Layered
    suppressed: list[Suppressed] = field(default_factory=list)

    def require(self) -> RunSpec:
        """The spec, if it has no errors.

        Raises:
            UserError: listing every error with its place.
        """
        return required_spec(self.spec, self.findings, self.layered.kind)


@dataclass(frozen=True)
class Unreadable:
    """A spec of which nothing could be looked at."""

    file: str
    error: UserError


@dataclass(frozen=True)
class CheckedFiles:
    """What is wrong with several specs, in order of file, line and column."""

    files: Sequence[str]
    """The specs that were asked for."""
    findings: Sequence[Finding]
    suppressed: Sequence[Suppressed] = ()
    unreadable: Sequence[Unreadable] = ()
    texts: Mapping[str, str] = field(default_factory=dict)
    """Every file that was read."""

    def count(self, severity: str) -> int:
        """How many findings have a severity."""
        return sum(finding.severity == severity for finding in self.findings)

    def only(self, codes: Container[str]) -> CheckedFiles:
        """The findings of some rules, and those that leave no spec to be checked."""
        return replace(
            self,
            findings=[f for f in self.findings if f.blocking or f.code in codes],
            suppressed=[one for one in self.suppressed if one.finding.code in codes],
        )


def check_spec(files: SpecFiles, *, environ: Mapping[str, str] | None = None) -> CheckedSpec:
    """Loads a spec and checks it by every rule.

    Args:
        files: what to load.
        environ: what `${VAR}` reads; the process's environment when None.

    Raises:
        UserError: as `load_layers`.
    """
    looked = _look(files, environ, ParsedFiles())
    findings = [*looked.applied.findings, *unused(looked.judged, looked.applied.used)]
    spec = looked.layered.spec
    return CheckedSpec(spec, findings, looked.layered, looked.applied.suppressed)


def check_files(specs: Sequence[SpecFiles]) -> CheckedFiles:
    """Checks several specs in one pass.

    A finding in a file that several of them extend is named once, and a suppression is unused
    where none of them uses it.
    """
    parsed, looked, unreadable = ParsedFiles(), [], []
    for files in specs:
        try:
            looked.append(_look(files, None, parsed))
        except UserError as error:
            unreadable.append(Unreadable(str(files.path), error))
    used = {pair for one in looked for pair in one.applied.used}
    judged = dict.fromkeys(suppression for one in looked for suppression in one.judged)
    findings = {finding for one in looked for finding in one.applied.findings}
    return CheckedFiles(
        [str(files.path) for files in specs],
        sorted({*findings, *unused(judged, used)}, key=_in_order),
        sorted(
            {suppressed for one in looked for suppressed in one.applied.suppressed},
            key=lambda suppressed: _in_order(suppressed.finding),
        ),
        unreadable,
        {file: text for one in looked for file, text in one.layered.texts.items()},
    )


def _in_order(finding: Finding) -> tuple[str, int, int, str, str, str]:
    place = (finding.file, finding.line, finding.column)
    return (*place, finding.code, finding.path, finding.message)


@dataclass(frozen=True)
class _Looked:
    """A spec before it is known which suppressions are of no use."""

    layered: Layered
    applied: Applied
    judged: list[Suppression]
    """Suppressions that should be of use in this very spec."""


def _look(files: SpecFiles, environ: Mapping[str, str] | None, parsed: ParsedFiles) -> _Looked:
    layered = load_layers(files, environ=environ, parsed=parsed)
    findings = list(layered.findings)
    if layered.spec is not None:
        findings += _rule_findings(layered, Context(layered.spec, files))
    findings = [_with_suggestion(finding) for finding in findings]
    comments = [comment for found in layered.comments.values() for comment in found]
    suppressions, faults = read_suppressions(comments)
    applied = apply_suppressions(suppressions, findings)
    applied.findings.extend(faults)
    # In a layer that lies under another, or that only now lies over this one, a suppression may
    # serve another spec; and without a spec no rule has looked.
    top = str(files.placement or _profile(files) or files.path)
    judged = [one for one in suppressions if one.comment.place.file == top]
    if layered.spec is None or files.overrides:
        judged = []
    return _Looked(layered, applied, judged)


def _with_suggestion(finding: Finding) -> Finding:
    """The finding, with its rule's suggestion where it has none of its own."""
    general = RULES[finding.code].suggestion
    if finding.suggestion or not general:
        return finding
    field = re.sub(r"(\.\d+)+$", "", finding.path)  # of a plain list's item, the list
    return replace(finding, suggestion=general.format(path=field))


def _profile(files: SpecFiles) -> Path | None:
    return profile_path(files.path, files.profile) if files.profile is not None else None


def _rule_findings(layered: Layered, context: Context) -> Iterator[Finding]:
    found = list(violations(context))
    secrets = [
        str(to_python(locate(layered.tree, violation.location)[2]))
        for _, violation in found
        if violation.secret
    ]
    for rule, violation in found:
        if any(secret in violation.message for secret in secrets):
            continue  # once the secret is gone it is looked at again
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
