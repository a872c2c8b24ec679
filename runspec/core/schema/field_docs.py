"""Documentation of the schema's fields: docstrings, types and defaults in words, and JSON Schema.

Docstrings are read from the source on demand: pydantic would collect them
(`use_attribute_docstrings`) at import, which would slow down every command.

The JSON Schema of spec files, for editors and other tools, describes one layer, not the merged
spec: every key may be missing (another layer may set it) or null (which deletes), a named list may
be a map by name, and `${VAR}` may replace any scalar. `runspec lint` checks the merged spec.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import TypeAdapter

from runspec.core.schema import RunSpec
from runspec.core.schema.fields import CHANGE_CLASSES, DURATION, RATE, SIZE, Block
from runspec.core.schema.layers import KIND
from runspec.core.schema.schema_fields import (
    SchemaField,
    block_in,
    fields_in,
    named_item,
    schema_fields,
)
from runspec.core.schema.yaml_text import yaml_scalar

_QUANTITIES = {each.pattern: each for each in (DURATION, SIZE, RATE)}
_NAMES = {"integer": "whole number", "number": "number", "boolean": "true or false"}


def field_doc(field: SchemaField) -> str:
    """Return the docstring under a field, or under that of a base of its block, as one paragraph.

    It is empty if there is none, and says so if only some kinds of the block have the field.
    """
    bases = (base for base in field.block.__mro__ if issubclass(base, Block))
    keys = ((base.__module__, (base.__qualname__, field.attribute)) for base in bases)
    doc = next(filter(None, (_documented(module).get(key, "") for module, key in keys)), "")
    if not doc or not field.kinds:
        return doc
    return f"{doc} For {' and '.join(f'`{kind}`' for kind in field.kinds)} only."


def block_doc(block: type[Block]) -> str:
    """Return a block's docstring."""
    return inspect.cleandoc(block.__doc__ or "")


@cache
def _documented(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings of one module by (class, field)."""
    source = sys.modules[module].__file__
    assert source is not None, "the schema is a package of files"
    classes = [
        node
        for node in ast.parse(Path(source).read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    ]
    return {
        (node.name, field.target.id): " ".join(str(below.value.value).split())
        for node in classes
        for field, below in zip(node.body, node.body[1:], strict=False)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
    }


def is_leaf(field: SchemaField) -> bool:
    """Return whether a field holds a value, not a block or a list of named blocks."""
    return block_in(field.annotation) is None and named_item(field.annotation) is None


@cache
def value_schema(path: str) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a leaf's value, null included if allowed."""
    schema = TypeAdapter(_annotated(schema_fields()[path])).json_schema()
    schema.pop("title", None)
    schema.pop("default", None)
    return schema


def default_value(field: SchemaField) -> Any:
    """Return a leaf's default as YAML writes it (`90m`, not 5400.0); None if it has none."""
    if field.required:
        return None
    return TypeAdapter(_annotated(field)).dump_python(field.default, mode="json")


def default_words(field: SchemaField) -> str:
    """Return a default as YAML text; `required` if there is none, empty for a block's keys."""
    if field.required:
        return "required"
    if not is_leaf(field):
        return "null" if field.default is None else ""
    value = default_value(field)
    if isinstance(value, list):
        return f"[{', '.join(yaml_scalar(item) for item in value)}]"
    return "{}" if isinstance(value, dict) else yaml_scalar(value)


def counted_type(field: SchemaField) -> str:
    """Return a field's type in words, with its unit if the type does not name it."""
    unit = f" ({field.unit})" if field.unit and "written with" not in field.unit else ""
    return f"{type_words(field)}{unit}"


def type_words(field: SchemaField) -> str:
    """Return a field's type and range in words: `whole number, at least 1, or null`."""
    if named_item(field.annotation) is not None:
        return "list of named maps, or a map from name to map"
    if block_in(field.annotation) is not None:
        return "map, or null" if not field.required and field.default is None else "map"
    return _words(value_schema(field.path))


def _annotated(field: SchemaField) -> Any:
    marks = field.block.model_fields[field.attribute].metadata
    return Annotated[(field.annotation, *marks)] if marks else field.annotation


def _words(schema: dict[str, Any]) -> str:
    if "anyOf" in schema:
        parts = [_words(part) for part in schema["anyOf"]]
        return ", or ".join(parts) if len(parts) == 2 else " or ".join(parts)
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "")
    if kind == "string":
        pattern = schema.get("pattern")
        if quantity := _QUANTITIES.get(pattern or ""):
            return f"{quantity.kind}, like {quantity.examples}"
        return f"text that matches `{pattern}`" if pattern else "text"
    if kind == "array":
        if items := schema.get("prefixItems"):
            return f"list of {len(items)}: each a {_words(items[0])}"
        inner = schema.get("items", {})
        least = ", not empty" if schema.get("minItems") else ""
        if inner.get("type") == "string" and "pattern" not in inner and "enum" not in inner:
            return f"list of text{least}"
        return f"list, each a {_words(inner)}{least}"
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"map to {_words(inner)}" if isinstance(inner, dict) else "map"
    return _NAMES.get(kind, kind) + _range_words(schema)


def _range_words(schema: dict[str, Any]) -> str:
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    most, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if schema.get("type") == "integer" and above is not None:
        least, above = above + 1, None
    limits = {"at least": least, "at most": most}
    if least is not None and most is not None:
        limits = {f"{_shown(least)} to": most}
    limits |= {"above": above, "below": below}
    return "".join(f", {words} {_shown(n)}" for words, n in limits.items() if n is not None)


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


Draft = Literal["07", "2020-12"]
DRAFTS: dict[Draft, str] = {
    "07": "http://json-schema.org/draft-07/schema#",
    "2020-12": "https://json-schema.org/draft/2020-12/schema",
}
"""URL of each draft's own schema."""

_TEXT = {"type": "string"}
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
    "items": _TEXT,
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
    unit = f"Unit: {field.unit}. " if field.unit else ""
    change = f"A change is {field.change}: {CHANGE_CLASSES[field.change]}."
    said: dict[str, Any] = {"description": f"{field_doc(field)} {unit}{change}"}
    if field.unit:
        said["x-unit"] = field.unit
    said |= {"x-change": field.change, "x-site": field.site}
    if block_in(field.annotation) is not None:
        return said | _map(field.path)
    if named_item(field.annotation) is not None:
        item = _map(path := f"{field.path}.<name>")
        return said | {
            "type": ["array", "object", "null"],
            "items": item | {"type": "object", "required": ["name"]},
            "propertyNames": value_schema(f"{path}.name"),
            "additionalProperties": item,
        }
    if field.default is not None:
        said["default"] = default_value(field)
    schema = value_schema(field.path)
    branches = [each for each in schema.get("anyOf", [schema]) if each.get("type") != "null"]
    # Free text matches a variable too, and a collection has none in its place.
    if not any(each.get("type") in ("array", "object") or each == _TEXT for each in branches):
        branches.append(_VARIABLE)
    return said | {"anyOf": [*branches, {"type": "null"}]}


def _map(path: str) -> dict[str, Any]:
    # `anyOf` a map and null would make editors report only that none of them fits.
    return {
        "type": ["object", "null"],
        "additionalProperties": False,
        "properties": {field.key: _property(field) for field in fields_in(path)},
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
