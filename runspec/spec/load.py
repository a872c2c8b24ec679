"""From YAML layers to one `RunSpec`, every finding in one pass.

Layers, lowest first: the files of `extends:`, the spec, the profile, `--set`. They are merged
(`merge`), variables are filled in (`interpolate`), the result is checked against the schema
(`validate`) and by the rules (`rules`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from runspec.common.errors import UserError
from runspec.spec.findings import Finding, Place, finding_at, format_finding
from runspec.spec.interpolate import interpolate
from runspec.spec.layers import LayerReader
from runspec.spec.merge import merge_layers
from runspec.spec.rules import broken_rules
from runspec.spec.schema import RunSpec
from runspec.spec.validate import locate, validate
from runspec.spec.yaml_nodes import MapNode, ScalarNode


@dataclass(frozen=True)
class LoadedSpec:
    """A spec and what is wrong with it.

    `spec` is None when the layers do not make a `RunSpec`; a spec with errors among its findings
    must not run (`require` sees to that).
    """

    spec: RunSpec | None
    findings: list[Finding]

    def require(self) -> RunSpec:
        """The spec, if it has no errors.

        Raises:
            UserError: listing every error with its place.
        """
        errors = [finding for finding in self.findings if finding.severity == "error"]
        if errors or self.spec is None:
            listed = "\n".join(format_finding(error) for error in errors)
            raise UserError(
                f"the spec has {len(errors)} error{'s' if len(errors) > 1 else ''}\n{listed}",
                remedy="mend the spec; `runspec lint` checks it without starting anything",
            )
        return self.spec


def load_spec(
    path: Path,
    *,
    profile: str | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> LoadedSpec:
    """Loads, merges, interpolates and checks a spec.

    Args:
        path: the spec.
        profile: name of an overlay in `profiles/` beside it.
        overrides: `path=value` each, applied last and in order.
        environ: what `${VAR}` reads; the process's environment when None.

    Raises:
        UserError: bad usage or nothing to look at: the file cannot be read, there is no such
            profile, an override is no `path=value`. Everything else is a finding.
    """
    findings: list[Finding] = []
    reader = LayerReader(findings)
    layers = reader.spec(path)
    if profile is not None:
        layers += reader.profile(path, profile)
    for number, override in enumerate(overrides, start=1):
        layers += reader.override(override, number)
    layer_missing = any(finding.code in ("yaml", "extends") for finding in findings)
    tree = merge_layers(layers, findings)
    if layer_missing:
        # What the rest lacks without the missing layer would only be noise.
        return LoadedSpec(None, [f for f in findings if f.code != "unknown-name"])
    # What is missing from the whole is missing from the spec's own file.
    tree = replace(tree, place=Place(str(path), 1, 1))
    tree, used = interpolate(tree, os.environ if environ is None else environ, findings)
    spec = validate(tree, findings)
    if spec is not None:
        findings += _rule_findings(spec, tree, used)
    return LoadedSpec(spec, findings)


def _rule_findings(spec: RunSpec, tree: MapNode, used: Mapping[str, ScalarNode]) -> list[Finding]:
    findings = []
    for code, violation in broken_rules(spec):
        place = locate(tree, violation.location)[0]
        path = ".".join(str(step) for step in violation.location)
        findings.append(
            finding_at(place, code, violation.message, path=path, severity=violation.severity)
        )
    for secret in spec.secrets:
        if node := used.get(secret.source.env):
            message = f"${{{secret.source.env}}} is a secret: its value would land in the spec"
            findings.append(
                finding_at(node.place, "secret-value", message, path=f"secrets.{secret.name}")
            )
    return findings
