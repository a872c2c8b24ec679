"""Checks a merged tree against the schema.

Each of pydantic's errors becomes a finding at the place that wrote the value. Plain scalars that
YAML 1.1 reads as another type (`on`, `010`, `12:30`) get the code `ambiguous-scalar`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from runspec.core.schema import SUPERVISED, RunSpec, Verify, yaml_nodes
from runspec.core.schema.fields import NAME_PATTERN, NAME_WORDS, Block, UnitError
from runspec.core.schema.findings import Finding, Number, Place, replacing
from runspec.core.schema.schema_fields import close_match, field_at, schema_fields
from runspec.core.schema.training import DEFAULT_KIND
from runspec.core.schema.yaml_text import other_reading

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
_AMBIGUOUS = "ambiguous-scalar"
_SAMPLED = (
    "warm_start",
    "reward",
    "samplers",
    "evaluations",
    "evaluator",
    "verify",
    *(
        f"data.{key}"
        for key in ("max_prompt_tokens", "length_prompt", "length_prompt_role", "system_prompt")
    ),
    "data.thinking",
    "data.think_prefill",
    *(f"data.sources.*.{key}" for key in ("dataset", "task_types", "size", "solve_rate", "train")),
)
"""What only runs that sample have; `*` stands for the items of a list."""
_OTHERS = {**dict.fromkeys(SUPERVISED, _SAMPLED), DEFAULT_KIND: ("data.sources.*.weight",)}
"""Paths that runs of a kind have no use for."""
_WANTED: dict[str, tuple[type, ...]] = {
    "bool_type": (bool,),
    "int_type": (int,),
    "float_type": (int, float),
    "string_type": (str,),
}


def validate(root: yaml_nodes.MapNode, findings: list[Finding]) -> RunSpec | None:
    """Return the spec that the tree makes, or None with a finding for each error."""
    spec = None
    try:
        spec = RunSpec.model_validate(to_python(root))
    except ValidationError as error:
        _extend(findings, (schema_finding(root, item) for item in error.errors(include_url=False)))
    _extend(findings, _ambiguous_scalars(root))
    found = [*_misplaced(root), *_lacking(root)]
    _extend(findings, found)
    return None if found else spec


def _misplaced(root: yaml_nodes.MapNode) -> Iterator[Finding]:
    """Find the values that runs of this `algorithm.kind` have no use for, but for defaults."""
    kind = _algorithm_kind(root)
    for path in _OTHERS.get(kind, ()):
        # The value that `runspec render` writes where a kind has no use for a path.
        unused = schema_fields()[path.replace("*", "<name>")].default
        if isinstance(unused, Block):
            none = {"validators": 0} if isinstance(unused, Verify) else {}
            unused = unused.model_dump(mode="json", by_alias=True) | none
        for place, shown, node in _places(root, tuple(path.split(".")), ""):
            if not _agrees(to_python(node), unused):
                yield _not_of(kind, place, shown)


def _agrees(value: Any, default: Any) -> bool:
    """Return whether a value is null or the default, or a map of which each value is."""
    if isinstance(value, dict) and isinstance(default, dict):
        return all(key in default and _agrees(each, default[key]) for key, each in value.items())
    return value is None or bool(value == default)


def _lacking(root: yaml_nodes.MapNode) -> Iterator[Finding]:
    """Find the parts that a run that samples needs and no other has."""
    if _algorithm_kind(root) != DEFAULT_KIND:
        return
    for key in ("reward", "samplers"):
        node = yaml_nodes.value_at(root, key)
        if node is None or (isinstance(node, yaml_nodes.ListNode) and not node.items):
            deleted = root.deleted.get(key)
            message = "a required key is missing" + (", deleted by this null" if deleted else "")
            if node is not None:
                message, deleted = "at least one is needed", node.place
            yield Finding(deleted or root.place, "missing-key", message, path=key, blocking=True)


def _algorithm_kind(root: yaml_nodes.MapNode) -> str:
    node = yaml_nodes.value_at(yaml_nodes.value_at(root, "algorithm"), "kind")
    return str(node.value) if isinstance(node, yaml_nodes.ScalarNode) else DEFAULT_KIND


def _places(
    node: yaml_nodes.Node | None, steps: tuple[str, ...], shown: str
) -> Iterator[tuple[Place, str, yaml_nodes.Node]]:
    """Yield where a path is set, and to what; `*` stands for all items of a list."""
    if not steps:
        return
    if steps[0] == "*" and isinstance(node, yaml_nodes.ListNode):
        for index, item in enumerate(node.items):
            name = yaml_nodes.object_name(item) or str(index)
            yield from _places(item, steps[1:], f"{shown}.{name}")
    elif isinstance(node, yaml_nodes.MapNode) and (entry := node.entries.get(steps[0])) is not None:
        path = f"{shown}.{steps[0]}" if shown else steps[0]
        if len(steps) == 1:
            yield entry.key_place, path, entry.value
        yield from _places(entry.value, steps[1:], path)


def _not_of(kind: str, place: Place, path: str) -> Finding:
    message = f"does not belong in a run of algorithm.kind {kind}"
    return Finding(
        place,
        "wrong-kind",
        message,
        path=path,
        suggestion="remove it, or a null in a higher layer deletes it",
        blocking=True,
    )


def _extend(findings: list[Finding], more: Iterable[Finding]) -> None:
    # One value can fail every branch of a union, or hold an unset variable: one finding is enough.
    seen = {(f.path, f.file, f.line, f.column) for f in findings}
    for finding in more:
        key = (finding.path, finding.file, finding.line, finding.column)
        if key not in seen:
            seen.add(key)
            findings.append(finding)


def to_python(node: yaml_nodes.Node) -> Any:
    """Return a tree as plain dicts, lists and scalars."""
    if isinstance(node, yaml_nodes.MapNode):
        return {key: to_python(entry.value) for key, entry in node.entries.items()}
    if isinstance(node, yaml_nodes.ListNode):
        return [to_python(item) for item in node.items]
    return node.value


def locate(
    root: yaml_nodes.Node, location: tuple[int | str, ...]
) -> tuple[Place, str, yaml_nodes.Node, bool]:
    """Follow pydantic's location, or a rule's, as far as the tree has it.

    Items of named lists are reached by index or by name, and shown by name.

    Returns:
        the place, the path as people write it, the node there, and whether the whole location was
        found.
    """
    node, shown = root, []
    for step in location:
        if isinstance(node, yaml_nodes.MapNode) and step in node.entries:
            node = node.entries[str(step)].value
            shown.append(str(step))
        elif isinstance(node, yaml_nodes.ListNode) and (item := _item(node, step)) is not None:
            node = item
            shown.append(yaml_nodes.object_name(item) or str(step))
        else:
            return node.place, ".".join(shown), node, False
    return node.place, ".".join(shown), node, True


def _item(node: yaml_nodes.ListNode, step: int | str) -> yaml_nodes.Node | None:
    if isinstance(step, int):
        return node.items[step] if step < len(node.items) else None
    return next((item for item in node.items if yaml_nodes.object_name(item) == step), None)


def schema_finding(root: yaml_nodes.MapNode, error: Any) -> Finding:
    """Return one of pydantic's errors as a finding at the place that wrote the value."""
    location, kind = error["loc"], error["type"]
    if (
        location[:1] == ("algorithm",)
        and location[1:2]
        and location[1] in (*SUPERVISED, DEFAULT_KIND)
    ):
        location = (location[0], *location[2:])  # pydantic names the chosen kind, the tree does not
    if kind == "union_tag_invalid":
        location, kind = (*location, "kind"), "literal_error"
        error = {**error, "ctx": {"expected": error["ctx"]["expected_tags"]}}
    place, path, node, found = locate(root, location)
    finding = partial(Finding, place, blocking=True)
    if kind == "missing":
        key = str(location[-1])
        deleted = node.deleted.get(key) if isinstance(node, yaml_nodes.MapNode) else None
        what = "a value" if isinstance(node, yaml_nodes.ListNode) else "a required key"
        message = f"{what} is missing" + (", deleted by this null" if deleted else "")
        path = f"{path}.{key}" if path else key
        code = "no-seed" if path == "seed" else "missing-key"
        return Finding(deleted or place, code, message, path, blocking=True)
    if kind == "extra_forbidden":
        return _not_of(_algorithm_kind(root), place, path)
    got = _shown(node)
    if not found:
        return finding("wrong-type", f"a single value was expected, got {got}", path)
    if kind in _EXPECTED:
        message = f"{_EXPECTED[kind]} was expected, got {got}"
        return _ambiguous_type(node, kind, path) or finding("wrong-type", message, path)
    context = error.get("ctx", {})
    if kind == "literal_error":
        match = close_match(str(to_python(node)), re.findall(r"'([^']*)'", context["expected"]))
        hint = f"did you mean {match}?" if match else ""
        message = f"{context['expected']} was expected, got {got}"
        return finding("bad-value", message, path, hint)
    message = error["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if context.get("pattern") == NAME_PATTERN:
        message = f"a name was expected: {NAME_WORDS}"
    code = "unit" if isinstance(context.get("error"), UnitError) else "bad-value"
    name, value = path.rpartition(".")[2], to_python(node)
    numbers: dict[str, Number] = {}
    requires = ""
    for bound, sign in _BOUNDS.items():
        if bound in context and isinstance(value, int | float):
            numbers, requires = {name: value}, f"{name} {sign} {context[bound]:g}"
    return finding(code, f"{message}, got {got}", path, numbers=numbers, requires=requires)


def _shown(node: yaml_nodes.Node) -> str:
    if isinstance(node, yaml_nodes.MapNode):
        return "a map"
    if isinstance(node, yaml_nodes.ListNode):
        return f"a list of {len(node.items)}"
    if node.value is None:
        return "null"
    if isinstance(node.value, bool):
        return str(node.value).lower()
    text = repr(node.value)
    return text if len(text) <= 60 else text[:57] + "..."


def _ambiguous_type(node: yaml_nodes.Node, kind: str, path: str) -> Finding | None:
    """Return the finding of a scalar that has the right type if quoted, or by YAML 1.1; else None.

    Args:
        node: a value of the wrong type.
        kind: pydantic's name of the expected type's error.
        path: of the node, as people write it.
    """
    written = node.place.written
    if (
        not isinstance(node, yaml_nodes.ScalarNode)
        or kind not in _WANTED
        or not written
        or "${" in written
    ):
        return None
    is_text, wanted, text = kind == "string_type", _WANTED[kind], None
    reading = other_reading(written) if node.plain else None
    if reading is not None and (is_text or type(reading) in wanted):
        code, got = _AMBIGUOUS, f"{_read(node)}; YAML 1.1 reads {_as_yaml(reading)}"
        text = _quoted(written) if is_text else _as_yaml(reading)
        hint = f"write {text}"
        if not is_text and ":" in written:
            text = None  # 12:30 may be minutes, hours or no time: only the writer knows
    else:
        # The same characters may have the expected type with quotes, or without them.
        code, got = "wrong-type", _raw(node)
        hint = "put it in quotes" if node.plain else "leave the quotes out"
        if is_text and node.plain and isinstance(node.value, bool | int | float):
            text = _quoted(written)
        elif not is_text and not node.plain and isinstance(node.value, str):
            with suppress(ValueError):
                text = node.value if type(yaml_nodes.resolve_scalar(node.value)) in wanted else None
        if text is None:
            return None
    return Finding(
        node.place,
        code,
        f"{_EXPECTED[kind]} was expected, got {got}",
        path=path,
        suggestion=hint,
        fix=None if text is None else replacing(node.place, text),
        blocking=True,
    )


def _ambiguous_scalars(root: yaml_nodes.MapNode) -> Iterator[Finding]:
    """Find valid plain scalars of a tree that YAML 1.1 reads as another value.

    Numbers in numeric fields are left out. Every other scalar can be written so that all versions
    of YAML read the same value.
    """
    for path, node in _scalars(root, ""):
        reading = other_reading(node.place.written) if node.plain else None
        if reading is None:
            continue
        above, _, last = path.rpartition(".")
        field = field_at(above if last.isdigit() else path)  # an item has the field of its list
        numeric = field is not None and {int, float} & set(_leaves(field.annotation))
        if numeric and not isinstance(node.value, str):
            continue
        text = _quoted(node.value) if isinstance(node.value, str) else str(node.value)
        yield Finding(
            node.place,
            _AMBIGUOUS,
            f"{_read(node)} here, but YAML 1.1 reads {_as_yaml(reading)}",
            path=path,
            severity="warning",
            suggestion=f"write {text}",
            fix=replacing(node.place, text),
        )


def _scalars(node: yaml_nodes.Node, path: str) -> Iterator[tuple[str, yaml_nodes.ScalarNode]]:
    dot = f"{path}." if path else ""
    if isinstance(node, yaml_nodes.MapNode):
        for key, entry in node.entries.items():
            yield from _scalars(entry.value, f"{dot}{key}")
    elif isinstance(node, yaml_nodes.ScalarNode):
        yield path, node
    else:
        for index, item in enumerate(node.items):
            yield from _scalars(item, f"{dot}{yaml_nodes.object_name(item) or index}")


def _leaves(annotation: Any) -> Iterator[Any]:
    """Return the types inside an annotation; none of a free map, which takes any value."""
    if get_origin(annotation) is dict:
        return
    inner = get_args(annotation)
    if not inner:
        yield annotation
    for part in inner:
        yield from _leaves(part)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _read(node: yaml_nodes.ScalarNode) -> str:
    return f"the text {_raw(node)}" if isinstance(node.value, str) else _raw(node)


def _raw(node: yaml_nodes.ScalarNode) -> str:
    return repr(node.value) if isinstance(node.value, str) else _as_yaml(node.value)


def _as_yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
