"""Plain scalars that YAML 1.1 reads otherwise than YAML 1.2, where a person may have meant so.

A spec is read by YAML 1.2's core schema, most other tools read 1.1 (https://yaml.org/type/), and
people remember what their tool did: `on` is text here, `010` is ten and `12:30` no time. Numbers
such as `1e-6`, which 1.1 takes for text, are left out: nobody means text by them.
"""

from __future__ import annotations

import re

# But for the last, compiled when they are needed: most specs have no such scalar.
_BOOL = r"[yYnN]|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF"
_TRUE = ("y", "yes", "on")
_LEADING_ZERO = r"[-+]?0[0-9_]+"
_OCTAL = r"[-+]?0[0-7_]+"
_BINARY = r"[-+]?0b_*[01][01_]*"
_INTEGER = r"[-+]?(0x_*[0-9a-fA-F][0-9a-fA-F_]*|[1-9][0-9_]*)"
_FLOAT = r"[-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?"
_SEXAGESIMAL = r"([-+]?)([0-9]+(?::[0-5]?[0-9])+(?:\.[0-9]*)?)"
_DATE = r"[0-9]{4}-[0-9]{1,2}-[0-9]{1,2}([Tt ].{1,40})?"
_ANY = re.compile(r"[yYnNoO].{0,2}|[-+]?0[0-9_b].*|[-+]?[0-9][0-9a-fA-Fx.]*[_:].*|[0-9]{4}-.*")
"""All that the others match, and nearly none of what a spec says."""
MAX_CHARACTERS = 64

Reading = bool | int | float | str


def other_reading(text: str) -> Reading | None:
    """What YAML 1.1 makes of a plain scalar, in words where it is a date or text.

    None where it reads the same, or where nobody means what it reads.
    """
    if len(text) > MAX_CHARACTERS or not _ANY.fullmatch(text):
        return None
    if re.fullmatch(_BOOL, text):
        return text.lower() in _TRUE
    bare = text.replace("_", "")
    if re.fullmatch(_LEADING_ZERO, text):
        return _leading_zero(text, bare)
    if re.fullmatch(_BINARY, text):
        return int(bare, 2)
    if "_" in text and re.fullmatch(_INTEGER, text):
        return int(bare, 0)
    if "_" in text and re.fullmatch(_FLOAT, text):
        return float(bare)
    if match := re.fullmatch(_SEXAGESIMAL, text):
        return _sexagesimal(match[1], match[2])
    return "a date" if re.fullmatch(_DATE, text) else None


def _leading_zero(text: str, bare: str) -> Reading | None:
    if not re.fullmatch(_OCTAL, text):
        return f"the text '{text}'"
    value = int(bare, 8)
    return None if "_" not in text and value == int(bare) else value


def _sexagesimal(sign: str, digits: str) -> Reading:
    value: int | float = 0
    for part in digits.split(":"):
        value = value * 60 + (float(part) if "." in part else int(part))
    return -value if sign == "-" else value
