"""A spec from its files, checked: the loader's findings and the rules', in one pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import runspec.lint.rules  # noqa: F401  (registers them)
from runspec.common.errors import UserError
from runspec.lint.registry import Context, violations
from runspec.spec.findings import Finding, finding_at, format_finding
from runspec.spec.load import Layered, SpecFiles, load_layers
from runspec.spec.schema import RunSpec
from runspec.spec.validate import locate


@dataclass(frozen=True)
class CheckedSpec:
    """A spec and what is wrong with it.

    `spec` is None when the layers do not make a `RunSpec`; a spec with errors among its findings
    must not run (`require` sees to that).
    """

    spec: RunSpec | None
    findings: list[Finding]
    layered: Layered

    def require(self) -> RunSpec:
        """The spec, if it has no errors.

        Raises:
            UserError: listing every error with its place.
        """
        errors = [finding for finding in self.findings if finding.severity == "error"]
        if self.layered.kind == "Placement" and not errors:
            raise UserError(
                "a file of kind Placement, which is no spec by itself",
                remedy="name the spec first, and this file with --placement",
            )
        if errors or self.spec is None:
            listed = "\n".join(format_finding(error) for error in errors)
            raise UserError(
                f"the spec has {len(errors)} error{'s' if len(errors) > 1 else ''}\n{listed}",
                remedy="mend the spec; `runspec lint` checks it without starting anything",
            )
        return self.spec


def check_spec(files: SpecFiles, *, environ: Mapping[str, str] | None = None) -> CheckedSpec:
    """Loads a spec and checks it by every rule.

    Args:
        files: what to load.
        environ: what `${VAR}` reads; the process's environment when None.

    Raises:
        UserError: as `load_layers`.
    """
    layered = load_layers(files, environ=environ)
    findings = list(layered.findings)
    if layered.spec is not None:
        findings += _rule_findings(layered, Context(layered.spec, files))
    return CheckedSpec(layered.spec, findings, layered)


def _rule_findings(layered: Layered, context: Context) -> Iterator[Finding]:
    for rule, violation in violations(context):
        place = locate(layered.tree, violation.location)[0]
        yield finding_at(
            replace(place, source="") if violation.secret else place,
            rule.code,
            violation.message,
            path=".".join(str(step) for step in violation.location),
            severity=violation.severity or rule.severity,
            numbers=violation.numbers,
            requires=violation.requires,
            suggestion=violation.suggestion,
        )
    for secret in context.spec.secrets:
        if node := layered.variables.get(secret.source.env):
            message = f"${{{secret.source.env}}} is a secret: its value would land in the spec"
            yield finding_at(node.place, "secret-value", message, path=f"secrets.{secret.name}")


def check_files(specs: Sequence[SpecFiles]) -> list[Finding]:
    """Findings of several specs, each once, in order of file, line and column.

    A finding in a file that several specs extend is named once.

    Raises:
        UserError: as `check_spec`.
    """
    findings = {finding for files in specs for finding in check_spec(files).findings}
    return sorted(findings, key=lambda f: (f.file, f.line, f.column, f.code, f.path))
