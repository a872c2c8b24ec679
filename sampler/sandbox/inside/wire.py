"""Messages between the parent, the launcher and the guard, each with its length in front.

The parent's order is written by `marshal`, which only the trusted may write: nobody else holds the
parent's end. What comes back, from processes nearer to the program, is bounded text.
"""

from __future__ import annotations

import marshal
import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # as `typing` says it, without its import
    from collections.abc import Callable
    from typing import Any

MAX_ANSWER_BYTES = 64 * 1024
_LENGTH_BYTES = 8


def encode_order(fields: dict[str, Any]) -> bytes:
    """An order's fields, which are plain values."""
    return _framed(marshal.dumps(fields))


def read_order(source: Any, receive: Callable[[Any, int], bytes] = os.read) -> dict[str, Any]:
    """The parent's order; empty where the parent closed before it was whole.

    Args:
        source: a descriptor, or what `receive` takes in its place.
        receive: returns at most so many bytes of the source, none at its end.
    """
    body = _body(source, receive, None)
    return marshal.loads(body) if body else {}  # noqa: S302 - the parent's, as said above


def answer(descriptor: int, **fields: str | float) -> None:
    """Sends names and values back.

    Raises:
        OSError: nobody reads any more.
    """
    lines = (f"{name} {str(value)[:4096]}".replace("\n", " ") for name, value in fields.items())
    rest = memoryview(_framed("\n".join(lines).encode(errors="replace")))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_answer(source: Any, receive: Callable[[Any, int], bytes] = os.read) -> dict[str, str]:
    """The next answer; empty where the other side closed before it was whole."""
    lines = _body(source, receive, MAX_ANSWER_BYTES).decode(errors="replace").splitlines()
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def _body(source: Any, receive: Callable[[Any, int], bytes], most: int | None) -> bytes:
    size = int.from_bytes(_exactly(source, receive, _LENGTH_BYTES), "big")
    return b"" if most is not None and size > most else _exactly(source, receive, size)


def _exactly(source: Any, receive: Callable[[Any, int], bytes], size: int) -> bytes:
    """So many bytes; none where the end comes before."""
    parts = []
    while size:
        part = receive(source, size)
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
