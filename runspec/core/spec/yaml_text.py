"""Plain data to YAML text that reads back the same, by YAML 1.2 and by YAML 1.1 alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from runspec.core.spec.yaml_nodes import ScalarValue, resolve_scalar
from runspec.core.spec.yaml_versions import other_reading

Comment = Callable[[tuple[str | int, ...]], str]
"""From the keys and indices of a scalar, or of a list on one line, to what stands behind it."""

_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./@+=()<>-]*(?:[ :][A-Za-z0-9_./@+=()<>-]+)*")
_INDENT = "  "


def _no_comment(path: tuple[str | int, ...]) -> str:
    return ""


def to_yaml(value: Mapping[str, Any], comment: Comment = _no_comment) -> str:
    """A document in block style, in the order of the maps; lists of scalars on one line."""
    return "".join(f"{line}\n" for line in _map(value, "", (), comment))


def yaml_scalar(value: ScalarValue) -> str:
    """A scalar as YAML; text is quoted wherever it could be read as something else."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        text = repr(value)
        # YAML 1.1 takes 1e-06 for text, and wants the point.
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    return value if _is_plain(value) else _quoted(value)


def _is_plain(text: str) -> bool:
    if not _PLAIN.fullmatch(text):
        return False
    try:
        return resolve_scalar(text) == text and other_reading(text) is None
    except ValueError:  # digits without end
        return False


def _quoted(text: str) -> str:
    return '"' + "".join(_escaped(c) for c in text) + '"'


def _escaped(character: str) -> str:
    if character in '"\\':
        return f"\\{character}"
    if character == "\n":
        return "\\n"
    if character.isprintable():
        return character
    return f"\\U{ord(character):08x}"


def _map(
    value: Mapping[str, Any], indent: str, path: tuple[str | int, ...], comment: Comment
) -> Iterator[str]:
    for key, item in value.items():
        yield from _entry(f"{indent}{yaml_scalar(key)}:", item, indent, (*path, key), comment)


def _entry(
    head: str, item: Any, indent: str, path: tuple[str | int, ...], comment: Comment
) -> Iterator[str]:
    if isinstance(item, Mapping) and item:
        yield head
        yield from _map(item, indent + _INDENT, path, comment)
    elif isinstance(item, list | tuple) and any(isinstance(i, Mapping) for i in item):
        yield head
        for number, element in enumerate(item):
            lines = _map(element, indent + 2 * _INDENT, (*path, number), comment)
            for first, line in enumerate(lines):
                yield line if first else f"{indent}{_INDENT}- {line.lstrip()}"
    else:
        # A break in a comment would end it.
        said = "".join(c if c.isprintable() else "?" for c in comment(path))
        yield f"{head} {_on_one_line(item)}" + (f"  # {said}" if said else "")


def _on_one_line(item: Any) -> str:
    if isinstance(item, Mapping):
        return "{}"
    if isinstance(item, Sequence) and not isinstance(item, str):
        return f"[{', '.join(_in_flow(i) for i in item)}]"
    return yaml_scalar(item)


def _in_flow(item: Any) -> str:
    text = yaml_scalar(item)
    return _quoted(text) if isinstance(item, str) and ":" in text and text[0] != '"' else text
