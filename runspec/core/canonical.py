"""Canonical JSON: each object has one byte string, so that it can be signed and hashed."""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 32
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[{]}")
_STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"', re.DOTALL)


class MalformedJson(ValueError):
    """Error: untrusted bytes are not a valid JSON object."""


def canonical_json(value: Any) -> bytes:
    """Return JSON with sorted keys, without white space, NaN or infinity, as UTF-8."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def parse_object(data: bytes, *, max_bytes: int) -> dict[str, Any]:
    """Parse a JSON object from untrusted bytes.

    Raises:
        MalformedJson: too large, too deep, not UTF-8, not an object, a duplicate key, or a value
            without canonical form: NaN, infinity (`1e999` too), half of a surrogate pair.
    """
    if len(data) > max_bytes:
        raise MalformedJson(f"{len(data)} bytes, more than the {max_bytes} allowed")
    if _depth(data) > MAX_DEPTH:
        raise MalformedJson(f"nested deeper than {MAX_DEPTH}")
    try:
        value = json.loads(
            data.decode(), object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise MalformedJson(str(error)) from error
    if not isinstance(value, dict):
        raise MalformedJson(f"a JSON object was expected, not {type(value).__name__}")
    try:
        canonical_json(value)
    except ValueError as error:
        raise MalformedJson(f"no canonical form: {error}") from error
    return value


def _depth(data: bytes) -> int:
    # Strings are left out: they may repeat what a stranger sent. A quote that ends no string is
    # a syntax error, at which the parser stops before it is deeper than what is counted here.
    depth = deepest = 0
    for byte in _STRING.sub(b"", data).translate(None, delete=_NO_BRACKETS):
        if byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
        else:
            depth -= 1
    return deepest


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise MalformedJson("the same key twice")
    return result


def _no_constant(name: str) -> Any:
    raise MalformedJson(f"{name} is not allowed")
