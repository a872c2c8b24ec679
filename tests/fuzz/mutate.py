"""Seeded changes of sound inputs, some microseconds each: what the fast lane draws with.

A `random.Random` decides everything, so that a case is its seed and number and nothing else.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

EDGES = [
    *(0, 1, -1, 2, 16, 127, 128, 255, 256, 32767, 65535, 65536, 2**31 - 1, 2**31, -(2**31)),
    *(2**32 - 1, 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 10**30, 10**400),
    -(10**400),
]
SCALARS = [
    *(None, True, False, 0.0, -0.0, 0.5, 1.0, -1.5, 1e300, -1e300, 1e-300, 3.0, 1e16),
    *("", "x", "null", "0", "1e999", "../x", "/x", "\0", "é", "\U0001f600", "a" * 63, "A" * 64),
    *("f" * 64, "F" * 64, "0" * 128, "x" * 400, "x" * 5000, " demo", "demo", "bfloat16"),
]
_CONTAINERS = ["[]", "{}", "[null]", "[[]]", '{"":0}', "[1,1]", '["x","x"]', '{"a":{"b":[0]}}']
_JSON_PIECES = [
    *(b'"', b"{", b"}", b"[", b"]", b"]" * 40, b"[" * 40, b'{"a":' * 40, b"\\u0061", b"\\ud800"),
    *(b"\\", b" ", b"\n", b",", b":", b"9" * 99, b"9" * 5000, b"1.0", b"1e999", b"-", b"NaN"),
    *(b"Infinity", b"true", b"null", b"\xff", b"\xc3", b"\0", b'"kind":"lease",', b'"":0,', b"{}"),
]
_WIDTHS = ["<b", "<h", ">h", "<i", ">i", "<q", ">q"]
_HOW_MANY = (1, 1, 1, 1, 2, 2, 3, 4)


def damaged(
    rng: Random, original: bytes, others: Sequence[bytes], pieces: Sequence[bytes]
) -> bytes:
    """Bytes with up to four changes: flips, edges of integers, cuts, splices, repetitions.

    Args:
        rng: decides.
        original: sound bytes.
        others: of which parts may come in.
        pieces: that the format is sensitive to.
    """
    data = bytearray(original)
    for _ in range(rng.choice(_HOW_MANY)):
        size = len(data)
        at = int(rng.random() * (size + 1))
        what = rng.random()
        if what < 0.2:
            if at < size:
                data[at] ^= 1 << int(rng.random() * 8)
        elif what < 0.3:
            width = rng.choice(_WIDTHS)
            number = struct.pack(width, rng.choice((0, 1, -1, 2, 127, -128)))
            data[at : at + len(number)] = number
        elif what < 0.5:
            piece = rng.choice(pieces)
            data[at : at + (len(piece) if rng.random() < 0.5 else 0)] = piece
        elif what < 0.65:
            other = rng.choice(others)
            start = int(rng.random() * (len(other) + 1))
            data[at : at + int(rng.random() * 30)] = other[start : start + int(rng.random() * 60)]
        elif what < 0.75:
            del data[at : at + 1 + int(rng.random() * 30)]
        elif what < 0.85:
            data[at:at] = data[at : at + 1 + int(rng.random() * 30)] * (1 + int(rng.random() * 3))
        elif what < 0.95:
            data[at : at + 1] = rng.randbytes(1 + int(rng.random() * 7))
        else:
            del data[at:]
    return bytes(data)


def damaged_json(rng: Random, original: bytes, others: Sequence[bytes]) -> bytes:
    """JSON with damage; every tenth time one of its members comes twice instead."""
    if rng.random() < 0.1:
        starts = [at for at in range(len(original)) if original[at : at + 2] in (b',"', b'{"')]
        start = rng.choice(starts)
        end = original.find(b',"', start + 1)
        member = original[start + 1 : end if end > 0 else len(original) - 1]
        return original[: start + 1] + member + b"," + original[start + 1 :]
    return damaged(rng, original, others, _JSON_PIECES)


class Changer:
    """Sound JSON values with up to four changes, made anew for each case.

    Args:
        sound: the values that are changed.
        odd: scalars that the format is sensitive to.
    """

    def __init__(self, sound: Sequence[Any], odd: Sequence[Any] = ()) -> None:
        self.texts = [json.dumps(value) for value in sound]
        self._scalars = [*SCALARS, *odd, *odd]
        self._inner = [*_CONTAINERS, *self.texts]
        self._inner += [json.dumps(part) for value in sound for part in _parts(value)]

    def __call__(self, rng: Random) -> Any:
        """A changed value; one in nine is sound."""
        value = json.loads(rng.choice(self.texts))
        for _ in range(rng.choice((0, 1, 1, 1, 1, 2, 2, 3, 4))):
            self._change(rng, value)
        return value

    def _change(self, rng: Random, node: Any) -> None:
        while node:
            key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
            child = node[key]
            if not (child and isinstance(child, dict | list) and rng.random() < 0.75):
                _CHANGES[int(rng.random() * len(_CHANGES))](self, rng, node, key)
                return
            node = child

    def _other(self, rng: Random) -> Any:
        what = rng.random()
        if what < 0.5:
            return rng.choice(self._scalars)
        return rng.choice(EDGES) if what < 0.75 else json.loads(rng.choice(self._inner))

    def _replace(self, rng: Random, node: Any, key: Any) -> None:
        node[key] = self._other(rng)

    def _remove(self, rng: Random, node: Any, key: Any) -> None:
        del node[key]

    def _add(self, rng: Random, node: Any, key: Any) -> None:
        if isinstance(node, dict):
            node[rng.choice(("", "x", "run", "step", f"{key}s", "x" * 300))] = self._other(rng)
        else:
            node.insert(key, self._other(rng))

    def _double(self, rng: Random, node: Any, key: Any) -> None:
        if isinstance(node, list):
            node.extend(node[key : key + 1] * rng.choice((1, 1, 2, 300)))
        else:
            node[rng.choice(list(node))] = node[key]

    def _nest(self, rng: Random, node: Any, key: Any) -> None:
        value = node[key]
        for _ in range(rng.choice((1, 1, 2, 28, 33))):
            value = [value] if rng.random() < 0.5 else {"x": value}
        node[key] = value

    def _nearly(self, rng: Random, node: Any, key: Any) -> None:
        value = node[key]
        if isinstance(value, str):
            at = int(rng.random() * (len(value) + 1))
            node[key] = rng.choice(
                (value[:at], value.upper(), value + "0", value[:at] + "\u0661" + value[at + 1 :])
            )
        elif isinstance(value, bool):
            node[key] = int(value)
        elif isinstance(value, int | float):
            nearly: tuple[Any, ...] = (value + 1, value - 1, -value, value * 2, str(value), [value])
            node[key] = rng.choice(nearly if abs(value) > 2**53 else (*nearly, float(value)))
        else:
            node[key] = self._other(rng)


_CHANGES: list[Callable[[Changer, Random, Any, Any], None]] = [
    *(Changer._replace, Changer._replace, Changer._nearly, Changer._nearly),
    *(Changer._remove, Changer._add, Changer._double, Changer._nest),
]


def _parts(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [
        part
        for child in inner
        if isinstance(child, dict | list)
        for part in (child, *_parts(child))
    ]
