"""From YAML layers to one `RunSpec` that fits the schema; the rules come after (`runspec.lint`).

Layers, lowest first: the files of `extends:`, the spec, the profile, the placement, `--set`. They
are merged (`merge`), variables are filled in (`interpolate`), and the result is checked against the
schema (`validate`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from runspec.core.errors import UserError
from runspec.core.spec.comments import Comment
from runspec.core.spec.findings import Finding, Place, format_finding
from runspec.core.spec.interpolate import interpolate
from runspec.core.spec.layers import LayerReader, ParsedFiles
from runspec.core.spec.lock_file import is_lock, parse_lock
from runspec.core.spec.merge import merge_layers
from runspec.core.spec.new_names import NewName, judge_new_names
from runspec.core.spec.placement_file import is_placement, site_layers
from runspec.core.spec.schema import RunSpec
from runspec.core.spec.validate import validate
from runspec.core.spec.yaml_nodes import MapNode

_MISSING = ("missing-key", "no-seed")


@dataclass(frozen=True)
class SpecFiles:
    """What the command line says of a spec."""

    path: Path
    profile: str | None = None
    """Name of an overlay in `profiles/` beside it."""
    placement: Path | None = None
    """A file of `kind: Placement`."""
    overrides: Sequence[str] = ()
    """`path=value` each, applied last and in order."""


@dataclass(frozen=True)
class Layered:
    """The merged layers, and what they make."""

    spec: RunSpec | None
    """None when the layers do not make one; the findings say why."""
    tree: MapNode
    """Every value with its place, variables filled in."""
    findings: Sequence[Finding] = ()
    """Of the files, the layers and the schema."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Every file that was read, by the name that findings give it."""
    comments: Mapping[str, Sequence[Comment]] = field(default_factory=dict)
    """Their `# runspec:` comments."""
    kind: Literal["Run", "Placement", "Lock"] = "Run"
    """What the file says that it is; a placement or a lock alone is never a spec."""

    def require(self) -> RunSpec:
        """The spec, if its layers make one; the rules of `runspec lint` are not asked.

        Raises:
            UserError: as `required_spec`.
        """
        return required_spec(self.spec, self.findings, self.kind)


def required_spec(spec: RunSpec | None, findings: Sequence[Finding], kind: str) -> RunSpec:
    """A spec that must be there and have no errors.

    Args:
        spec: what the layers make, if they make one.
        findings: what is wrong with it.
        kind: what the file says that it is.

    Raises:
        UserError: listing every error with its place.
    """
    errors = [finding for finding in findings if finding.severity == "error"]
    if kind != "Run" and not errors:
        raise UserError(
            f"a file of kind {kind}, which is no spec by itself",
            remedy="name the spec; a placement follows it with --placement",
        )
    if errors or spec is None:
        listed = "\n".join(format_finding(error) for error in errors)
        raise UserError(
            f"the spec has {len(errors)} error{'s' if len(errors) > 1 else ''}\n{listed}",
            remedy="mend the spec; `runspec lint` checks it without starting anything",
        )
    return spec


def load_layers(
    files: SpecFiles,
    *,
    environ: Mapping[str, str] | None = None,
    parsed: ParsedFiles | None = None,
) -> Layered:
    """Loads, merges, interpolates and validates a spec.

    Args:
        files: what to load.
        environ: what `${VAR}` reads; the process's environment when None.
        parsed: files that were read before, for other specs; it takes up those that are read now.

    Raises:
        UserError: bad usage or nothing to look at: the file cannot be read, there is no such
            profile, an override is no `path=value`. Everything else is a finding.
    """
    findings: list[Finding] = []
    reader = LayerReader(findings, parsed or ParsedFiles())
    layers = reader.spec(files.path)
    if layers and is_lock(layers[-1]):
        # `specs/*.yaml` names it too.
        parse_lock(layers[-1], findings)
        return Layered(None, layers[-1], findings, reader.texts, reader.comments, "Lock")
    if layers and is_placement(layers[-1]):
        return _placement_alone(files, layers, reader, environ, findings)
    if files.profile is not None:
        layers += reader.profile(files.path, files.profile)
    if files.placement is not None:
        layers += reader.placement(files.placement, merge_layers(layers, []))
    for number, override in enumerate(files.overrides, start=1):
        layers += reader.override(override, number)
    layer_missing = any(finding.code in ("yaml", "extends") for finding in findings)
    new_names: list[NewName] = []
    tree = merge_layers(layers, findings, new_names)
    if layer_missing:
        # What the rest lacks without the missing layer would only be noise.
        findings = [f for f in findings if f.code != "unknown-name"]
        return Layered(None, tree, findings, reader.texts, reader.comments)
    # What is missing from the whole is missing from the spec's own file.
    tree = replace(tree, place=Place(str(files.path), 1, 1))
    tree = interpolate(tree, os.environ if environ is None else environ, findings)
    spec = validate(tree, findings)
    findings = judge_new_names(findings, new_names)
    return Layered(spec, tree, findings, reader.texts, reader.comments)


def _placement_alone(
    files: SpecFiles,
    layers: list[MapNode],
    reader: LayerReader,
    environ: Mapping[str, str] | None,
    findings: list[Finding],
) -> Layered:
    """A placement without its recipe: its keys, their types and its scope are looked at."""
    if files.profile is not None or files.placement is not None or files.overrides:
        raise UserError(
            "a file of kind Placement, over which nothing goes",
            place=str(files.path),
            remedy="name the spec first, and this file with --placement",
        )
    tree = merge_layers(site_layers(layers, None, findings), findings)
    tree = interpolate(tree, os.environ if environ is None else environ, findings)
    validate(tree, findings)
    # What is missing, and what its nulls take away, is the recipe's to say.
    found = [finding for finding in findings if finding.code not in (*_MISSING, "unknown-name")]
    return Layered(None, tree, found, reader.texts, reader.comments, "Placement")
