"""JSON Schema of spec files, for editors and other tools.

It describes one layer, not the merged spec: every key may be missing (another layer may set it) or
null (which deletes), a named list may be a map by name, and `${VAR}` may replace any scalar.
`runspec lint` checks the merged spec.
"""

from __future__ import annotations

from typing import Any, Literal

from runspec.core.spec.field_docs import block_doc, default_value, field_doc, value_schema
from runspec.core.spec.fields import CHANGE_CLASSES
from runspec.core.spec.placement_file import KIND
from runspec.core.spec.schema import RunSpec
from runspec.core.spec.schema_fields import SchemaField, block_in, fields_in, named_item

Draft = Literal["07", "2020-12"]
DRAFTS: dict[Draft, str] = {
    "07": "http://json-schema.org/draft-07/schema#",
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
}
"""URL of each draft's own schema."""

_VARIABLE = {"$ref": "#/$defs/variable"}
_DEFS = {
    "variable": {
        "description": "Filled in from the environment: ${NAME}, or ${NAME:?message}.",
        "type": "string",
        "pattern": r"\$\{[A-Za-z_][A-Za-z0-9_]*(:\?[^}]*)?\}",
    }
}
_EXTENDS = {
    "description": "Files that this one goes over, lowest first, relative to it.",
    "type": "array",
    "items": {"type": "string"},
}


def json_schema(draft: Draft) -> dict[str, Any]:
    """Return one schema for specs, profiles and placement files.

    Args:
        draft: `07`, for editors, or `2020-12`.
    """
    properties = {"extends": _EXTENDS, **_map("")["properties"]}
    properties["kind"] |= {"anyOf": [{"enum": ["Run", KIND]}, {"type": "null"}]}
    schema = {
        "$schema": DRAFTS[draft],
        "title": "runspec/v1",
        "description": f"{block_doc(RunSpec).splitlines()[0]} A spec, a profile or a placement.",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "if": {"properties": {"kind": {"const": KIND}}, "required": ["kind"]},
        "then": _only_site("", header=True),
        "$defs": _DEFS,
    }
    return _as_draft_07(schema) if draft == "07" else schema


def _property(field: SchemaField) -> dict[str, Any]:
    """Return the schema of one key."""
    said: dict[str, Any] = {"description": _description(field)}
    if field.unit:
        said["x-unit"] = field.unit
    said |= {"x-change": field.change, "x-site": field.site}
    if block_in(field.annotation) is not None:
        return said | _map(field.path)
    if named_item(field.annotation) is not None:
        return said | _named_list(f"{field.path}.<name>")
    if field.default is not None:
        said["default"] = default_value(field)
    branches = [*_branches(value_schema(field.path)), *_variable(field), {"type": "null"}]
    return said | {"anyOf": branches}


def _description(field: SchemaField) -> str:
    parts = [field_doc(field)]
    if field.unit:
        parts.append(f"Unit: {field.unit}.")
    parts.append(f"A change is {field.change}: {CHANGE_CLASSES[field.change]}.")
    return " ".join(parts)


def _branches(schema: dict[str, Any]) -> list[dict[str, Any]]:
    branches: list[dict[str, Any]] = schema.get("anyOf", [schema])
    return [branch for branch in branches if branch.get("type") != "null"]


def _variable(field: SchemaField) -> list[dict[str, Any]]:
    """Return the branch for `${VAR}`: none for free text, which matches it, and for collections."""
    branches = _branches(value_schema(field.path))
    if any(branch.get("type") in ("array", "object") for branch in branches):
        return []
    free = any(branch.keys() == {"type"} and branch["type"] == "string" for branch in branches)
    return [] if free else [_VARIABLE]


def _map(path: str) -> dict[str, Any]:
    # `anyOf` a map and null would make editors report only that none of them fits.
    return {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {field.key: _property(field) for field in fields_in(path)},
    }


def _named_list(path: str) -> dict[str, Any]:
    """Return the schema of a list of named maps, or of a map by name."""
    item = _map(path)
    return {
        "type": ["array", "object", "null"],
        "items": item | {"type": "object", "required": ["name"]},
        "propertyNames": value_schema(f"{path}.name"),
        "additionalProperties": item,
    }


def _only_site(path: str, *, header: bool = False) -> dict[str, Any]:
    """Return the keys that a placement file may not set, as properties that nothing satisfies."""
    properties: dict[str, Any] = {}
    for field in fields_in(path):
        key = field.key
        if field.site or (header and key in ("version", "kind", "name")) or key == "name":
            continue
        if block_in(field.annotation) is not None:
            properties[key] = _only_site(field.path)
        elif named_item(field.annotation) is not None:
            item = _only_site(f"{field.path}.<name>")
            properties[key] = {"items": item, "additionalProperties": item}
        else:
            properties[key] = False
    return {"properties": properties}


def _as_draft_07(value: Any) -> Any:
    """Return the schema in draft 07: with `definitions`, and a tuple's items as a list."""
    if isinstance(value, list):
        return [_as_draft_07(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "prefixItems" in value:
        value = {**value, "items": value["prefixItems"], "additionalItems": False}
        del value["prefixItems"]
    changed = {key: _as_draft_07(item) for key, item in value.items()}
    if "$defs" in changed:
        changed["definitions"] = changed.pop("$defs")
    if "$ref" in changed:
        changed["$ref"] = changed["$ref"].replace("/$defs/", "/definitions/")
    return changed
