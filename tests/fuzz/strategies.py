"""Sound inputs with up to four changes, as Hypothesis strategies; the simplest has no change."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

EDGES = [
    *(0, 1, -1, 2, 16, 127, 128, 255, 256, 32767, 65535, 65536, 2**31 - 1, 2**31, -(2**31)),
    *(2**32 - 1, 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64 - 1, 10**30, 10**400),
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
TEXT_PIECES = [
    *(str(edge).encode() for edge in EDGES if abs(edge) < 10**40),
    *(b"", b" ", b"\t", b"\n", b"\r\n", b"\0", b",", b";", b":", b"-", b"=", b"/", b"//"),
    *(b"%", b"%00", b"%zz", b"&", b"#", b"?", b"[", b"]", b"[::1]", b"::", b"@", b".", b"..", b"*"),
    *(b"\xc3\xa9", b"\xff", b"\xd9\xa1", b"1e9", b"inf", b"nan"),
    *(b"0" * 40, b"x" * 300, b"9" * 4400),
]
_INTEGERS = [struct.pack(how, n) for how in ("<h", ">h", "<i", "<q") for n in (0, 1, -1, 127)]


@st.composite
def damaged(draw: DrawFn, sound: Sequence[bytes], pieces: Sequence[bytes] = ()) -> bytes:
    """Bytes of which parts are replaced: by nothing, pieces, parts of others, or any bytes.

    Args:
        draw: given by Hypothesis.
        sound: bytes without a fault.
        pieces: what the format is sensitive to.
    """
    data = bytearray(draw(st.sampled_from(sound)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(data)))
        instead = draw(
            st.sampled_from([b"", *pieces, *_INTEGERS])
            | st.binary(min_size=1, max_size=8)
            | st.builds(_part, st.sampled_from(sound), st.integers(0, 2**20), st.integers(0, 60))
        )
        # As many bytes as come in, so that what follows stays where it is, or any number.
        gone = len(instead) if draw(st.booleans()) else draw(st.integers(0, 30))
        data[at : at + gone] = instead
        if draw(st.integers(0, 15)) == 15:
            del data[at:]
    return bytes(data)


def _part(data: bytes, at: int, size: int) -> bytes:
    start = at % (len(data) + 1)
    return data[start : start + size]


def texts(*sound: str, latin: bool = False) -> SearchStrategy[str]:
    """Damaged texts as they come over the wire."""
    how = ("latin-1", "strict") if latin else ("utf-8", "surrogateescape")
    return damaged([text.encode() for text in sound], TEXT_PIECES).map(lambda b: b.decode(*how))


def damaged_json(sound: Sequence[bytes]) -> SearchStrategy[bytes]:
    """Damaged JSON objects, and some of which a member comes twice."""
    return damaged(sound, _JSON_PIECES) | st.builds(
        _with_a_member_twice, st.sampled_from(sound), st.integers(0, 2**10)
    )


def _with_a_member_twice(original: bytes, which: int) -> bytes:
    starts = [at for at in range(len(original)) if original[at : at + 2] in (b',"', b'{"')]
    start = starts[which % len(starts)]
    end = original.find(b',"', start + 1)
    member = original[start + 1 : end if end > 0 else len(original) - 1]
    return original[: start + 1] + member + b"," + original[start + 1 :]


def changed(sound: Sequence[Any], odd: Sequence[Any] = ()) -> SearchStrategy[Any]:
    """JSON values of which members are replaced, removed, added, repeated or nested.

    Args:
        sound: values without a fault.
        odd: scalars that the format is sensitive to.
    """
    inner = [*_CONTAINERS, *(json.dumps(part) for value in sound for part in _parts(value))]
    other = st.sampled_from([*odd, *SCALARS, *EDGES]) | st.sampled_from(inner).map(json.loads)
    return _changed(st.sampled_from([json.dumps(value) for value in sound]), other)


@st.composite
def _changed(draw: DrawFn, sound: SearchStrategy[str], other: SearchStrategy[Any]) -> Any:
    value = json.loads(draw(sound))
    for _ in range(draw(st.integers(0, 4))):
        node = value
        while node:
            key = draw(st.sampled_from(list(node) if isinstance(node, dict) else range(len(node))))
            child = node[key]
            if not (child and isinstance(child, dict | list) and draw(st.integers(0, 3))):
                _change(draw, node, key, draw(other))
                break
            node = child
    return value


def _change(draw: DrawFn, node: Any, key: Any, other: Any) -> None:
    match draw(st.sampled_from(["replace", "nearly", "remove", "add", "repeat", "nest"])):
        case "replace":
            node[key] = other
        case "nearly":
            node[key] = draw(st.sampled_from([*_near(node[key]), other]))
        case "remove":
            del node[key]
        case "add" if isinstance(node, dict):
            names = ("", "x", "run", "step", f"{key}s", "x" * 300)
            node[draw(st.sampled_from(names))] = other
        case "add":
            node.insert(key, other)
        case "repeat" if isinstance(node, dict):
            node[draw(st.sampled_from(list(node)))] = node[key]
        case "repeat":
            node.extend(node[key : key + 1] * draw(st.sampled_from((1, 2, 300))))
        case _:
            for _ in range(draw(st.sampled_from((1, 2, 28, 33)))):
                node[key] = [node[key]]


def _near(value: Any) -> Iterator[Any]:
    """Values that differ from one by little."""
    match value:
        case str():
            half = len(value) // 2
            yield from (value[:half], value.upper(), value + "0", value[:half] + "\u0661")
        case bool():
            yield int(value)
        case int() | float():
            yield from (value + 1, value - 1, -value, value * 2, str(value), [value])
            if abs(value) < 2**53:
                yield float(value)


def _parts(value: Any) -> Iterator[Any]:
    """The containers of a value, itself included."""
    if isinstance(value, dict | list):
        yield value
        for child in value.values() if isinstance(value, dict) else value:
            yield from _parts(child)
