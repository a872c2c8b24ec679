"""Plain data between processes that do not trust each other.

No object with code of one side reaches the other, so comparisons use only built-in types. This file
also runs in the sandbox, so it imports only the standard library.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MAX_DEPTH = 64
MAX_COLLISIONS = 64
"""Most keys of equal hash in a set or dictionary. An attacker can choose such numbers, and each is
then compared with all the others."""
_SMALL = 1 << 53


class NotPlain(Exception):
    """A value that is no plain data, or nested too deep."""


def encode(value: Any, depth: int = 0) -> Any:
    """Return Python data as JSON data; an instance of a subclass is stored as its built-in type."""
    if depth > MAX_DEPTH:
        raise NotPlain("nested too deep")
    if value is None or isinstance(value, (bool, str)):
        return value if value is None or isinstance(value, bool) else str.__str__(value)
    if isinstance(value, int):
        value = int.__index__(value)
        return value if -_SMALL < value < _SMALL else {"i": hex(value)}
    if isinstance(value, float):
        return {"f": float.hex(value)}
    if isinstance(value, complex):
        return {"c": [float.hex(value.real), float.hex(value.imag)]}
    if isinstance(value, (bytes, bytearray)):
        return {"b": bytes(value).hex()}
    if isinstance(value, list):
        return [encode(item, depth + 1) for item in list.__iter__(value)]
    if isinstance(value, dict):
        pairs = dict.items(value)
        return {"d": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in pairs]}
    if isinstance(value, tuple):
        return {"t": [encode(item, depth + 1) for item in tuple.__iter__(value)]}
    if isinstance(value, set):
        return {"s": [encode(item, depth + 1) for item in set.__iter__(value)]}
    if isinstance(value, frozenset):
        return {"z": [encode(item, depth + 1) for item in frozenset.__iter__(value)]}
    if isinstance(value, range):
        return {"r": [encode(part) for part in (value.start, value.stop, value.step)]}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        return encode(value.tolist(), depth + 1)
    raise NotPlain(f"{type(value).__name__} is no plain data")


def decode(data: Any, depth: int = 0) -> Any:
    """Invert `encode`, for data from an untrusted process.

    Raises:
        NotPlain: `encode` does not write such data.
    """
    if depth > MAX_DEPTH:
        raise NotPlain("nested too deep")
    if data is None or isinstance(data, (bool, int, str, float)):
        return data
    if isinstance(data, list):
        return [decode(item, depth + 1) for item in data]
    if not isinstance(data, dict) or len(data) != 1:
        raise NotPlain("malformed data")
    ((tag, inner),) = data.items()
    try:
        return _DECODERS[tag](inner, depth + 1)
    except (LookupError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise NotPlain("malformed data") from error


def _items(inner: Any, depth: int) -> list[Any]:
    if not isinstance(inner, list):
        raise NotPlain("malformed data")
    return [decode(item, depth) for item in inner]


def _keys(keys: list[Any]) -> list[Any]:
    counts: dict[int, int] = {}
    for key in keys:
        counts[hash(key)] = seen = counts.get(hash(key), 0) + 1
        if seen > MAX_COLLISIONS:
            raise NotPlain("too many keys of one hash")
    return keys


def _dictionary(inner: Any, depth: int) -> dict[Any, Any]:
    pairs = [(decode(key, depth), decode(value, depth)) for key, value in inner]
    _keys([key for key, _ in pairs])
    return dict(pairs)


_DECODERS: dict[str, Callable[[Any, int], Any]] = {
    "i": lambda inner, depth: int(inner, 16),
    "f": lambda inner, depth: float.fromhex(inner),
    "c": lambda inner, depth: complex(float.fromhex(inner[0]), float.fromhex(inner[1])),
    "b": lambda inner, depth: bytes.fromhex(inner),
    "t": lambda inner, depth: tuple(_items(inner, depth)),
    "s": lambda inner, depth: set(_keys(_items(inner, depth))),
    "z": lambda inner, depth: frozenset(_keys(_items(inner, depth))),
    "r": lambda inner, depth: range(*_items(inner, depth)),
    "d": _dictionary,
}
