"""Loads YAML layers as one `RunSpec` that fits the schema; `runspec.lint` applies its rules later.

Layers, lowest first: the files of `extends:`, the spec, the profile, the placement, `--set`. They
are merged (`merge_layers`), variables are filled in (`interpolate`), and the result is checked
against the schema (`validate`). `origins` says which layer wrote each value.

The resolved spec is canonical JSON, which every role of a run reads. It contains the signed
profiles that the spec names. So a validator on another machine receives them with the spec that the
coordinator signs, and nobody can exchange one later. `verify.profile` checks their signatures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from runspec.core.canonical import canonical_json, digest_bytes, parse_object
from runspec.core.errors import UserError, one_line
from runspec.core.files import expand_user, read_bounded
from runspec.core.schema import CalibrationProfile, RunSpec, yaml_nodes
from runspec.core.schema.findings import SET_FILE, Comment, Finding, Place, format_finding
from runspec.core.schema.layers import (
    LayerReader,
    ParsedFiles,
    is_placement,
    profile_path,
    site_layers,
)
from runspec.core.schema.lock_file import is_lock, parse_lock
from runspec.core.schema.schema_fields import NewName, judge_new_names, merge_layers
from runspec.core.schema.validate import locate, validate

_MISSING = ("missing-key", "no-seed")
VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::\?([^}]*))?\}")
Location = tuple[str | int, ...]
"""Keys and indices from the root of a spec."""


@dataclass(frozen=True)
class SpecFiles:
    """Layers of a spec as the command line names them."""

    path: Path
    profile: str | None = None
    """Name of an overlay in `profiles/` beside it."""
    placement: Path | None = None
    """A file of `kind: Placement`."""
    overrides: Sequence[str] = ()
    """`path=value` each, applied last and in order."""


@dataclass(frozen=True)
class Layered:
    """Merged layers, and the spec that they make."""

    spec: RunSpec | None
    """None if the layers make no valid spec; the findings say why."""
    tree: yaml_nodes.MapNode
    """Every value with the place that wrote it, variables filled in."""
    findings: Sequence[Finding] = ()
    """Findings of the files, the layers and the schema."""
    texts: Mapping[str, str] = field(default_factory=dict)
    """Text of every file that was read, by the name that findings give it."""
    comments: Mapping[str, Sequence[Comment]] = field(default_factory=dict)
    """Their `# runspec:` comments."""
    kind: Literal["Run", "Placement", "Lock"] = "Run"
    """Kind that the file declares; a placement or a lock alone is not a spec."""

    def require(self) -> RunSpec:
        """Return the spec, which must exist and have no errors among its findings.

        Raises:
            UserError: it lists every error with its place.
        """
        errors = [finding for finding in self.findings if finding.severity == "error"]
        if self.kind != "Run" and not errors:
            raise UserError(
                f"a file of kind {self.kind}, which is no spec by itself",
                remedy="name the spec; a placement follows it with --placement",
            )
        if errors or self.spec is None:
            listed = "\n".join(format_finding(error) for error in errors)
            raise UserError(
                f"the spec has {len(errors)} error{'s' if len(errors) > 1 else ''}\n{listed}",
                remedy="mend the spec; `runspec lint` checks it without starting anything",
            )
        return self.spec


def load_layers(
    files: SpecFiles,
    *,
    environ: Mapping[str, str] | None = None,
    parsed: ParsedFiles | None = None,
) -> Layered:
    """Load, merge, interpolate and validate a spec.

    Args:
        files: what to load.
        environ: the variables for `${VAR}`; the process's environment if None.
        parsed: cache of files that were parsed for other specs; files read now are added.

    Raises:
        UserError: the file cannot be read, the profile does not exist, or an override is not
            `path=value`. Every other error is a finding.
    """
    findings: list[Finding] = []
    reader = LayerReader(findings, {} if parsed is None else parsed)
    layers = reader.file(files.path)
    if layers and is_lock(layers[-1]):
        # A pattern such as `specs/*.yaml` matches locks too.
        parse_lock(layers[-1], findings)
        return Layered(None, layers[-1], findings, reader.texts, reader.comments, "Lock")
    if layers and is_placement(layers[-1]):
        return _placement_alone(files, layers, reader, environ, findings)
    if files.profile is not None:
        layers += reader.profile(files.path, files.profile)
    if files.placement is not None:
        recipe = merge_layers(layers, [])
        layers += site_layers(reader.file(files.placement), recipe, findings)
    for number, override in enumerate(files.overrides, start=1):
        layers += reader.override(override, number)
    layer_missing = any(finding.code in ("yaml", "extends") for finding in findings)
    new_names: list[NewName] = []
    tree = merge_layers(layers, findings, new_names)
    if layer_missing:
        # Findings that follow from the missing layer would only be noise.
        findings = [f for f in findings if f.code != "unknown-name"]
        return Layered(None, tree, findings, reader.texts, reader.comments)
    # A missing key is reported in the spec's own file.
    tree = replace(tree, place=Place(str(files.path), 1, 1))
    tree = interpolate(tree, os.environ if environ is None else environ, findings)
    spec = validate(tree, findings)
    findings = judge_new_names(findings, new_names)
    return Layered(spec, tree, findings, reader.texts, reader.comments)


def _placement_alone(
    files: SpecFiles,
    layers: list[yaml_nodes.MapNode],
    reader: LayerReader,
    environ: Mapping[str, str] | None,
    findings: list[Finding],
) -> Layered:
    """Check a placement without its recipe: its keys, their types and its scope."""
    if files.profile is not None or files.placement is not None or files.overrides:
        raise UserError(
            "a file of kind Placement, over which nothing goes",
            place=str(files.path),
            remedy="name the spec first, and this file with --placement",
        )
    tree = merge_layers(site_layers(layers, None, findings), findings)
    tree = interpolate(tree, os.environ if environ is None else environ, findings)
    validate(tree, findings)
    # The recipe decides about missing keys and about the names that nulls delete.
    found = [finding for finding in findings if finding.code not in (*_MISSING, "unknown-name")]
    return Layered(None, tree, found, reader.texts, reader.comments, "Placement")


def interpolate(
    root: yaml_nodes.MapNode, environ: Mapping[str, str], findings: list[Finding]
) -> yaml_nodes.MapNode:
    """Fill in `${VAR}` and `${VAR:?message}` in the values of a merged tree.

    A plain scalar takes the type of the text that it became (`steps: ${STEPS}` is a number), a
    quoted one stays text; a variable never adds maps or lists. `${VAR:?message}` refuses an empty
    variable too, with its own message.

    Variables that `secrets` names are reported and never filled in: a finding that quotes a value
    would show the secret.
    """
    secrets = yaml_nodes.value_at(root, "secrets")
    items = secrets.items if isinstance(secrets, yaml_nodes.ListNode) else ()
    names = [yaml_nodes.value_at(yaml_nodes.value_at(item, "from"), "env") for item in items]
    secret = frozenset(str(name.value) for name in names if isinstance(name, yaml_nodes.ScalarNode))

    def report(
        node: yaml_nodes.Node, path: str, text: str, hint: str = "", code: str = "variable"
    ) -> None:
        finding = Finding(node.place, code, text, path=path, suggestion=hint, blocking=True)
        findings.append(finding)

    def value_of(match: re.Match[str], node: yaml_nodes.Node, path: str) -> str:
        name, message = match[1], match[2]
        if name in secret:
            text = f"${{{name}}} is a secret: its value would land in the spec"
            report(node, path, text, code="secret-value")
            return ""
        value = environ.get(name)
        if value is None or (message is not None and not value):
            state = "not set" if value is None else "empty"
            text = f"variable {name} is {state}" + (f": {message}" if message else "")
            report(node, path, text, f"export {name}=...")
            return ""
        if "${" in value:
            # A reader of the rendered spec would fill it in again.
            report(node, path, f"variable {name} holds ${{ itself")
        return value

    def filled(node: yaml_nodes.Node, path: str) -> yaml_nodes.Node:
        if isinstance(node, yaml_nodes.MapNode):
            dot = f"{path}." if path else ""
            entries = {
                key: yaml_nodes.Entry(entry.key_place, filled(entry.value, f"{dot}{key}"))
                for key, entry in node.entries.items()
            }
            return replace(node, entries=entries)
        if isinstance(node, yaml_nodes.ListNode):
            items = [
                filled(item, f"{path}.{yaml_nodes.object_name(item) or index}")
                for index, item in enumerate(node.items)
            ]
            return yaml_nodes.ListNode(tuple(items), node.place)
        if not isinstance(node.value, str) or "${" not in node.value:
            return node
        before = len(findings)
        if "${" in VARIABLE.sub("", node.value):
            report(node, path, "a variable is written ${NAME} or ${NAME:?message}")
        text = VARIABLE.sub(lambda match: value_of(match, node, path), node.value)
        try:
            value = yaml_nodes.resolve_scalar(text) if node.plain else text
        except ValueError as error:
            report(node, path, str(error))
        # The original text gives no second finding if text is the right type.
        return (
            node if len(findings) > before else yaml_nodes.ScalarNode(value, node.place, node.plain)
        )

    tree = filled(root, "")
    assert isinstance(tree, yaml_nodes.MapNode)
    return tree


def origin(layered: Layered, files: SpecFiles, location: Location) -> str:
    """Return `file:line` of the layer that wrote a value, `--set`, or `default`.

    Args:
        layered: the merged layers.
        files: the layers' files.
        location: of a scalar or of a list of scalars.
    """
    place, _, _, found = locate(layered.tree, location)
    if not found:
        return "default"
    if place.file == SET_FILE:
        return f"{SET_FILE} {files.overrides[place.line - 1]}"
    file, layer = Path(place.file), ""
    if files.placement is not None and file == files.placement:
        layer = " (placement)"
    elif files.profile and file == profile_path(files.path, files.profile):
        layer = f" (profile {files.profile})"
    return f"{place.file}:{place.line}{layer}"


def origins(layered: Layered, files: SpecFiles, resolved: Mapping[str, Any]) -> dict[str, str]:
    """Return the origin of every value by its path, with names for the items of named lists."""
    return {path: origin(layered, files, at) for path, at in _leaves(resolved, (), "")}


def _leaves(value: Any, at: Location, path: str) -> list[tuple[str, Location]]:
    if isinstance(value, Mapping) and value:
        items = [(str(key), key, item) for key, item in value.items()]
    elif isinstance(value, list) and value and all(isinstance(item, Mapping) for item in value):
        items = [(str(item.get("name", i)), i, item) for i, item in enumerate(value)]
    else:
        return [(path, at)]
    return [
        leaf
        for shown, key, item in items
        for leaf in _leaves(item, (*at, key), f"{path}.{shown}".removeprefix("."))
    ]


FILE_NAME = "spec.json"
MAX_BYTES = 1024 * 1024
MAX_PROFILE_BYTES = 64 * 1024


def dump_resolved(spec: RunSpec) -> bytes:
    """Return canonical JSON with every default written out."""
    return canonical_json(spec.model_dump(mode="json", by_alias=True))


def spec_digest(spec: RunSpec) -> str:
    return digest_bytes(dump_resolved(spec))


def parse_resolved(data: bytes, *, place: str) -> RunSpec:
    """Parse a resolved spec from bytes (a file, or a coordinator's answer).

    Raises:
        UserError: `data` is not a resolved spec.
    """
    try:
        return RunSpec.model_validate(parse_object(data, max_bytes=MAX_BYTES))
    except ValueError as error:
        words = str(error)
        if isinstance(error, ValidationError):
            words = "; ".join(
                f"{'.'.join(map(str, each['loc']))}: {each['msg'].removeprefix('Value error, ')}"
                for each in error.errors(include_url=False)[:3]  # a few say enough
            )
        raise UserError(
            f"not a resolved run spec: {one_line(words, 400)}",
            place=place,
            remedy="make it with `runspec apply`",
        ) from error


def load_resolved(run_dir: Path) -> RunSpec:
    """Read `spec.json` of a run directory.

    Raises:
        UserError: it cannot be read.
    """
    path = run_dir / FILE_NAME
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read the resolved spec: {error}",
            place=str(path),
            remedy="start the run with `runspec apply`",
        ) from error
    return parse_resolved(data, place=str(path))


def profile_text(profile: CalibrationProfile, folder: Path) -> str:
    """Return the signed document of a profile, from the resolved spec or else from its file.

    Args:
        profile: an entry of `verify.profiles`.
        folder: folder of the spec's file, the base of relative paths.

    Raises:
        UserError: no file is named, or it cannot be read as text within the bound.
    """
    if profile.document is not None:
        return profile.document
    if profile.file is None:
        raise UserError(
            "names no file",
            place=f"verify.profiles.{profile.name}",
            remedy="file: what `python -m verify calibrate` wrote",
        )
    path = folder / expand_user(Path(profile.file))
    try:
        return read_bounded(path, MAX_PROFILE_BYTES).decode()
    except (OSError, ValueError) as error:  # ValueError: invalid path or UTF-8
        reason = getattr(error, "strerror", None) or str(error)
    except UserError as error:
        reason = error.thing
    raise UserError(
        f"cannot read {str(path)[:200]}: {reason}",
        place=f"verify.profiles.{profile.name}",
        remedy="name the file that `python -m verify calibrate` wrote; a relative path starts from "
        "the spec's folder",
    )


def with_profiles(spec: RunSpec, folder: Path) -> RunSpec:
    """Return the spec with the contents of its profiles' files."""
    profiles = [
        profile.model_copy(update={"document": profile_text(profile, folder)})
        for profile in spec.verify.profiles
    ]
    verify = spec.verify.model_copy(update={"profiles": profiles})
    return spec.model_copy(update={"verify": verify})
