"""Canonical JSON: one object, one byte string, so that a signature over it means something."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 32
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[{]}")


class MalformedJson(ValueError):
    """Bytes from outside that are not the JSON object they should be."""


def canonical_json(value: Any) -> bytes:
    """Sorted keys, no white space, UTF-8, no NaN or infinity."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()


def parse_object(data: bytes, *, max_bytes: int) -> dict[str, Any]:
    """Reads a JSON object from untrusted bytes.

    Raises:
        MalformedJson: too large, too deep, not UTF-8, not an object, a key twice, or a value that
            has no canonical form: NaN, infinity (`1e999` too), half of a surrogate pair.
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
    # Counts brackets inside strings too: an over-estimate, which only refuses odd input.
    depth = deepest = 0
    for byte in data.translate(None, delete=_NO_BRACKETS):
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
