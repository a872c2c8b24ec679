"""Scalars that were read as another type than their writer may have meant."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, get_args, get_origin

from runspec.core.spec.findings import Edit, Finding, replacing
from runspec.core.spec.schema_fields import field_at
from runspec.core.spec.yaml_nodes import MapNode, Node, ScalarNode, object_name, resolve_scalar
from runspec.core.spec.yaml_versions import Reading, other_reading

CODE = "ambiguous-scalar"
_WANTED: dict[str, tuple[type, ...]] = {
    "bool_type": (bool,),
    "int_type": (int,),
    "float_type": (int, float),
    "string_type": (str,),
}
_NAMES = {
    "bool_type": "true or false",
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
}


def misread(node: Node, kind: str, path: str) -> Finding | None:
    """What to say of a scalar of the wrong type that says, quoted or by YAML 1.1, the right one.

    Args:
        node: of the wrong type.
        kind: what pydantic calls the type that was expected.
        path: of the node, as people write it.
    """
    written = node.place.written
    if not isinstance(node, ScalarNode) or kind not in _WANTED or not written or "${" in written:
        return None
    reading = other_reading(written) if node.plain else None
    if reading is not None and (kind == "string_type" or type(reading) in _WANTED[kind]):
        return _otherwise(node, kind, path, reading)
    text = _retyped(node, kind)
    if text is None:
        return None
    hint = "put it in quotes" if node.plain else "leave the quotes out"
    return Finding(
        node.place,
        "wrong-type",
        f"{_NAMES[kind]} was expected, got {_raw(node)}",
        path=path,
        suggestion=hint,
        fix=replacing(node.place, text),
        blocking=True,
    )


def misread_scalars(root: MapNode) -> Iterator[Finding]:
    """Plain scalars of a tree that are valid, and that YAML 1.1 would read otherwise.

    A number in a numeric field is what it says; everything else that is found can be written so
    that every version of YAML reads what runspec reads.
    """
    for path, node in _scalars(root, ""):
        reading = other_reading(node.place.written) if node.plain else None
        if reading is None or (not isinstance(node.value, str) and _is_numeric(path)):
            continue
        text = _quoted(node.value) if isinstance(node.value, str) else str(node.value)
        yield Finding(
            node.place,
            CODE,
            f"{_read(node)} here, but YAML 1.1 reads {_shown(reading)}",
            path=path,
            severity="warning",
            suggestion=f"write {text}",
            fix=replacing(node.place, text),
        )


def _otherwise(node: ScalarNode, kind: str, path: str, reading: Reading) -> Finding:
    written = node.place.written
    edit: Edit | None = None
    if kind == "string_type":
        hint, edit = f"write {_quoted(written)}", replacing(node.place, _quoted(written))
    else:
        hint = f"write {_shown(reading)}"
        # 12:30 may be minutes, hours or no time at all: whoever wrote it must say.
        edit = replacing(node.place, _shown(reading)) if ":" not in written else None
    message = f"{_NAMES[kind]} was expected, got {_read(node)}; YAML 1.1 reads {_shown(reading)}"
    return Finding(node.place, CODE, message, path=path, suggestion=hint, fix=edit, blocking=True)


def _retyped(node: ScalarNode, kind: str) -> str | None:
    """The same characters as the type that was expected, None where they cannot be."""
    if kind == "string_type":
        is_other = node.plain and isinstance(node.value, bool | int | float)
        return _quoted(node.place.written) if is_other else None
    if node.plain or not isinstance(node.value, str):
        return None
    try:
        value = resolve_scalar(node.value)
    except ValueError:
        return None
    return node.value if type(value) in _WANTED[kind] else None


def _scalars(node: Node, path: str) -> Iterator[tuple[str, ScalarNode]]:
    dot = f"{path}." if path else ""
    if isinstance(node, MapNode):
        for key, entry in node.entries.items():
            yield from _scalars(entry.value, f"{dot}{key}")
    elif isinstance(node, ScalarNode):
        yield path, node
    else:
        for index, item in enumerate(node.items):
            yield from _scalars(item, f"{dot}{object_name(item) or index}")


def _is_numeric(path: str) -> bool:
    above, _, last = path.rpartition(".")
    field = field_at(above if last.isdigit() else path)  # an item of a list is of its kind
    return field is not None and bool({int, float} & set(_leaves(field.annotation)))


def _leaves(annotation: Any) -> Iterator[Any]:
    """The types that an annotation is made of; nothing of a free map, where any would do."""
    if get_origin(annotation) is dict:
        return
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for part in inner:
        yield from _leaves(part)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _read(node: ScalarNode) -> str:
    return f"the text {_raw(node)}" if isinstance(node.value, str) else _raw(node)


def _raw(node: ScalarNode) -> str:
    return repr(node.value) if isinstance(node.value, str) else _shown(node.value)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
