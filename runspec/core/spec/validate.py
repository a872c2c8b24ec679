"""A merged tree against the schema: pydantic's errors, each at the place that wrote the value."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError

from runspec.core.spec.findings import Finding, Number, Place
from runspec.core.spec.misread import misread, misread_scalars
from runspec.core.spec.schema import RunSpec
from runspec.core.spec.schema_keys import close_match
from runspec.core.spec.values import NAME_PATTERN, NAME_WORDS, UnitError
from runspec.core.spec.yaml_nodes import ListNode, MapNode, Node, object_name

_EXPECTED = {
    "int_type": "a whole number",
    "float_type": "a number",
    "string_type": "text",
    "bool_type": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a map",
    "model_type": "a map",
    "model_attributes_type": "a map",
    "finite_number": "a finite number",
}
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def validate(root: MapNode, findings: list[Finding]) -> RunSpec | None:
    """The spec that the tree makes, or None with a finding for everything that is in the way."""
    spec = None
    try:
        spec = RunSpec.model_validate(to_python(root))
    except ValidationError as error:
        _extend(findings, (schema_finding(root, item) for item in error.errors(include_url=False)))
    _extend(findings, misread_scalars(root))
    return spec


def _extend(findings: list[Finding], more: Iterable[Finding]) -> None:
    # One value can fail every branch of a union, or hold a variable that is not set: one finding
    # is enough.
    seen = {(f.path, f.file, f.line, f.column) for f in findings}
    for finding in more:
        key = (finding.path, finding.file, finding.line, finding.column)
        if key not in seen:
            seen.add(key)
            findings.append(finding)


def to_python(node: Node) -> Any:
    """Plain dicts, lists and scalars."""
    if isinstance(node, MapNode):
        return {key: to_python(entry.value) for key, entry in node.entries.items()}
    if isinstance(node, ListNode):
        return [to_python(item) for item in node.items]
    return node.value


def locate(root: Node, location: tuple[int | str, ...]) -> tuple[Place, str, Node, bool]:
    """Follows pydantic's location, or a rule's, as far as the tree has it.

    Items of named lists are reached by index or by name, and shown by name.

    Returns:
        the place, the path as people write it, the node there, and whether the whole location was
        found.
    """
    node, shown = root, []
    for step in location:
        if isinstance(node, MapNode) and step in node.entries:
            node = node.entries[str(step)].value
            shown.append(str(step))
        elif isinstance(node, ListNode) and (item := _item(node, step)) is not None:
            node = item
            shown.append(object_name(item) or str(step))
        else:
            return node.place, ".".join(shown), node, False
    return node.place, ".".join(shown), node, True


def _item(node: ListNode, step: int | str) -> Node | None:
    if isinstance(step, int):
        return node.items[step] if step < len(node.items) else None
    return next((item for item in node.items if object_name(item) == step), None)


def schema_finding(root: MapNode, error: Any) -> Finding:
    """One of pydantic's errors, at the place that wrote the value."""
    location, kind = error["loc"], error["type"]
    place, path, node, found = locate(root, location)
    if kind == "missing":
        key = str(location[-1])
        deleted = node.deleted.get(key) if isinstance(node, MapNode) else None
        what = "a value" if isinstance(node, ListNode) else "a required key"
        message = f"{what} is missing" + (", deleted by this null" if deleted else "")
        path = f"{path}.{key}" if path else key
        code = "no-seed" if path == "seed" else "missing-key"
        return Finding(deleted or place, code, message, path=path, blocking=True)
    got = _shown(node)
    if not found:
        message = f"a single value was expected, got {got}"
        return Finding(place, "wrong-type", message, path=path, blocking=True)
    if kind in _EXPECTED:
        return misread(node, kind, path) or Finding(
            place,
            "wrong-type",
            f"{_EXPECTED[kind]} was expected, got {got}",
            path=path,
            blocking=True,
        )
    context = error.get("ctx", {})
    if kind == "literal_error":
        match = close_match(str(to_python(node)), re.findall(r"'([^']*)'", context["expected"]))
        hint = f"did you mean {match}?" if match else ""
        message = f"{context['expected']} was expected, got {got}"
        return Finding(place, "bad-value", message, path=path, suggestion=hint, blocking=True)
    message = error["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if context.get("pattern") == NAME_PATTERN:
        message = f"a name was expected: {NAME_WORDS}"
    code = "unit" if isinstance(context.get("error"), UnitError) else "bad-value"
    numbers, requires = _bound(path.rpartition(".")[2], to_python(node), context)
    return Finding(
        place,
        code,
        f"{message}, got {got}",
        path=path,
        numbers=numbers,
        requires=requires,
        blocking=True,
    )


def _bound(name: str, value: Any, context: dict[str, Any]) -> tuple[dict[str, Number], str]:
    """What was measured, and the bound that it is beyond; nothing where it is no bound."""
    for kind, sign in _BOUNDS.items():
        if kind in context and isinstance(value, int | float):
            return {name: value}, f"{name} {sign} {context[kind]:g}"
    return {}, ""


def _shown(node: Node) -> str:
    if isinstance(node, MapNode):
        return "a map"
    if isinstance(node, ListNode):
        return f"a list of {len(node.items)}"
    if node.value is None:
        return "null"
    if isinstance(node.value, bool):
        return str(node.value).lower()
    text = repr(node.value)
    return text if len(text) <= 60 else text[:57] + "..."
