"""What values a field takes: as JSON Schema, and in words."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import TypeAdapter

from runspec.core.spec.schema_fields import SchemaField, schema_fields
from runspec.core.spec.schema_keys import block_in, named_item
from runspec.core.spec.values import DURATION, RATE, SIZE
from runspec.core.spec.yaml_text import yaml_scalar

_QUANTITIES = {each.pattern: each for each in (DURATION, SIZE, RATE)}
_NAMES = {"integer": "whole number", "number": "number", "boolean": "true or false"}


def is_leaf(field: SchemaField) -> bool:
    """Whether it holds a value, and no block or list of named blocks."""
    return block_in(field.annotation) is None and named_item(field.annotation) is None


@cache
def value_schema(path: str) -> dict[str, Any]:
    """JSON Schema (2020-12) of what a leaf's value may be, null included where it may be null."""
    schema = TypeAdapter(_annotated(schema_fields()[path])).json_schema()
    schema.pop("title", None)
    schema.pop("default", None)
    return schema


def default_value(field: SchemaField) -> Any:
    """A leaf's default as YAML would write it: `90m`, not 5400.0; None where there is none."""
    if field.required:
        return None
    return TypeAdapter(_annotated(field)).dump_python(field.default, mode="json")


def default_words(field: SchemaField) -> str:
    """A default as YAML writes it; `required` where there is none, empty for a block's keys."""
    if field.required:
        return "required"
    if not is_leaf(field):
        return "null" if field.default is None else ""
    value = default_value(field)
    if isinstance(value, list):
        return f"[{', '.join(yaml_scalar(item) for item in value)}]"
    return "{}" if isinstance(value, dict) else yaml_scalar(value)


def counted_type(field: SchemaField) -> str:
    """A field's type with what it counts, where the type does not say so."""
    unit = f" ({field.unit})" if field.unit and "written with" not in field.unit else ""
    return f"{type_words(field)}{unit}"


def type_words(field: SchemaField) -> str:
    """A field's type for people, with its range: `whole number, at least 1, or null`."""
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
        return _text_words(schema)
    if kind == "array":
        return _list_words(schema)
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"map to {_words(inner)}" if isinstance(inner, dict) else "map"
    return _NAMES.get(kind, kind) + _range_words(schema)


def _text_words(schema: dict[str, Any]) -> str:
    pattern = schema.get("pattern")
    if quantity := _QUANTITIES.get(pattern or ""):
        return f"{quantity.kind}, like {quantity.examples}"
    return f"text that matches `{pattern}`" if pattern else "text"


def _list_words(schema: dict[str, Any]) -> str:
    if "prefixItems" in schema:
        items = schema["prefixItems"]
        return f"list of {len(items)}: each a {_words(items[0])}"
    inner = schema.get("items", {})
    least = ", not empty" if schema.get("minItems") else ""
    if inner.get("type") == "string" and "pattern" not in inner and "enum" not in inner:
        return f"list of text{least}"
    return f"list, each a {_words(inner)}{least}"


def _range_words(schema: dict[str, Any]) -> str:
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    most, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if schema.get("type") == "integer" and above is not None:
        least, above = above + 1, None
    words = []
    if least is not None and most is not None:
        words.append(f"{_shown(least)} to {_shown(most)}")
    else:
        words += [f"at least {_shown(least)}"] if least is not None else []
        words += [f"at most {_shown(most)}"] if most is not None else []
    words += [f"above {_shown(above)}"] if above is not None else []
    words += [f"below {_shown(below)}"] if below is not None else []
    return "".join(f", {word}" for word in words)


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
