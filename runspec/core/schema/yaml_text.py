"""Writes plain data as YAML text that YAML 1.1 and YAML 1.2 read the same way.

runspec reads a spec by YAML 1.2's core schema, most other tools by YAML 1.1
(https://yaml.org/type/). There `on` is true, `010` is eight and `12:30` is 750. `other_reading`
finds such plain scalars. It leaves out numbers such as `1e-6`, which YAML 1.1 takes for text:
nobody means text by them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import date
from typing import Any

import yaml

from runspec.core.schema.yaml_nodes import ScalarValue, resolve_scalar

_BOOL = {**dict.fromkeys("yY", True), **dict.fromkeys("nN", False)}
"""Readings of YAML 1.1 that PyYAML leaves out."""
_LEADING_ZERO = r"[-+]?0[0-9_]+"
_DATE = r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].{1,40})?"
_ANY = re.compile(r"[yYnNoO].{0,2}|[-+]?0[0-9_b].*|[-+]?[0-9][0-9a-fA-Fx.]*[_:].*|[0-9]{4}-.*")
"""Matches what YAML 1.1 may read otherwise, and nearly nothing else in a spec."""
MAX_CHARACTERS = 64

Reading = bool | int | float | str
Comment = Callable[[tuple[str | int, ...]], str]
"""Returns the comment behind a scalar, or behind a list on one line, by its keys and indices."""
_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./@+=()<>-]*(?:[ :][A-Za-z0-9_./@+=()<>-]+)*")
_COLON = re.compile(r'[^"]*:')
_INDENT = "  "


def other_reading(text: str) -> Reading | None:
    """Return YAML 1.1's value of a plain scalar, in words if it is a date or text.

    None if YAML 1.2 reads the same, or if nobody means that value.
    """
    if len(text) > MAX_CHARACTERS or not _ANY.fullmatch(text):
        return None
    if text in _BOOL:
        return _BOOL[text]
    try:
        value = yaml.safe_load(text)  # PyYAML reads by YAML 1.1
    except (ValueError, yaml.YAMLError):
        value = text
    if isinstance(value, date) or re.fullmatch(_DATE, text):
        return "a date"
    if value == text:  # a number such as 08 is text
        return f"the text '{text}'" if re.fullmatch(_LEADING_ZERO, text) else None
    same = "_" not in text and value == resolve_scalar(text)
    return None if same or not isinstance(value, Reading) else value


def to_yaml(value: Mapping[str, Any], comment: Comment = lambda path: "") -> str:
    """Return a document in block style, in the order of the maps; lists of scalars on one line."""
    return "".join(f"{line}\n" for line in _map(value, "", (), comment))


def yaml_scalar(value: ScalarValue) -> str:
    """Return a scalar as YAML; text is quoted if it could be read as another type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        text = repr(value)
        # YAML 1.1 takes 1e-06 for text: it requires the point.
        return text.replace("e", ".0e") if "e" in text and "." not in text else text
    if _PLAIN.fullmatch(value):
        with suppress(ValueError):  # an integer that is too long
            if resolve_scalar(value) == value and other_reading(value) is None:
                return value
    return _quoted(value)


def _quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)  # JSON is a subset of YAML 1.2
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)


def _map(
    value: Mapping[str, Any], indent: str, path: tuple[str | int, ...], comment: Comment
) -> Iterator[str]:
    for key, item in value.items():
        head, at = f"{indent}{yaml_scalar(key)}:", (*path, key)
        if isinstance(item, Mapping) and item:
            yield head
            yield from _map(item, indent + _INDENT, at, comment)
        elif isinstance(item, list | tuple) and any(isinstance(i, Mapping) for i in item):
            yield head
            for number, element in enumerate(item):
                lines = _map(element, indent + 2 * _INDENT, (*at, number), comment)
                for first, line in enumerate(lines):
                    yield line if first else f"{indent}{_INDENT}- {line.lstrip()}"
        else:
            # A line break would end the comment.
            behind = "".join(c if c.isprintable() else "?" for c in comment(at))
            if isinstance(item, list | tuple):
                texts = (yaml_scalar(each) for each in item)
                # In a list, text with a colon could be read as a map.
                quoted = (_quoted(text) if _COLON.match(text) else text for text in texts)
                shown = f"[{', '.join(quoted)}]"
            else:
                shown = "{}" if isinstance(item, Mapping) else yaml_scalar(item)
            yield f"{head} {shown}" + (f"  # {behind}" if behind else "")
