"""Canonical JSON, and BLAKE3 digests: each object has one byte string that is signed and hashed.

Digests are 64 lower-case hexadecimal characters.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from blake3 import blake3

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


_HEX_DIGEST = re.compile(r"[0-9a-f]{64}")


def digest_bytes(data: bytes | memoryview) -> str:
    """Return the BLAKE3 digest of bytes."""
    return blake3(data).hexdigest()


def digest_file(path: Path) -> str:
    """Return the BLAKE3 digest of a file, memory-mapped, so that it may be larger than memory."""
    hasher = blake3()
    hasher.update_mmap(path)
    return hasher.hexdigest()


def is_digest(text: object) -> bool:
    """Return whether `text` has the form of a digest, which is safe as a file name."""
    return isinstance(text, str) and _HEX_DIGEST.fullmatch(text) is not None


def hash_parts(*parts: bytes | str | int) -> bytes:
    """Return BLAKE3 over length-prefixed parts, 32 bytes; another split gives another hash.

    Strings are UTF-8, integers 8 bytes big-endian. Each part follows its length in 8 bytes.
    """
    hasher = blake3()
    for part in parts:
        if isinstance(part, int):
            part = part.to_bytes(8, "big")
        elif isinstance(part, str):
            part = part.encode()
        hasher.update(len(part).to_bytes(8, "big") + part)
    return hasher.digest()
