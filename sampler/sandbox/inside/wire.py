"""Messages between the parent, the launcher and the guard: a dictionary with its length in front.

These three are trusted and alone hold the descriptors, so `marshal` may read what it finds there.
"""

from __future__ import annotations

import marshal
import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # as `typing` says it, without its import
    from collections.abc import Callable
    from typing import Any

_LENGTH_BYTES = 8


def encode(message: dict[str, Any]) -> bytes:
    """A message of plain values, as bytes."""
    data = marshal.dumps(message)
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def write(descriptor: int, message: dict[str, Any]) -> None:
    """Sends a message whole.

    Raises:
        OSError: nobody reads any more.
    """
    rest = memoryview(encode(message))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read(source: Any, receive: Callable[[Any, int], bytes] = os.read) -> dict[str, Any] | None:
    """The next message, or None where the other side closed before one was whole.

    Args:
        source: a descriptor, or what `receive` takes in its place.
        receive: returns at most so many bytes of the source, none at its end.
    """
    head = _exactly(source, receive, _LENGTH_BYTES)
    body = head and _exactly(source, receive, int.from_bytes(head, "big"))
    return marshal.loads(body) if body else None  # noqa: S302 - trusted, as said above


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
