"""Messages between the parent and the launcher: pairs of bytes, each with its length in front."""

from __future__ import annotations

import os

MAX_MESSAGE_BYTES = 256 << 20
_CHUNK = 1 << 20


def encode(pairs: list[tuple[str, bytes]]) -> bytes:
    """A message: its length, then every key and value, each as `length:bytes`."""
    fields = [field for key, value in pairs for field in (key.encode(), value)]
    body = b"".join(b"%d:%b" % (len(field), field) for field in fields)
    return b"%d:%b" % (len(body), body)


def decode(body: bytes) -> list[tuple[str, bytes]]:
    """The pairs of a message's body.

    Raises:
        ValueError: not what `encode` writes.
    """
    fields, at = [], 0
    while at < len(body):
        colon = body.index(b":", at, at + 12)
        at = colon + 1 + int(body[at:colon])
        fields.append(body[colon + 1 : at])
    if len(fields) % 2 or at != len(body):
        raise ValueError("a message that is cut off")
    return [(fields[i].decode(), fields[i + 1]) for i in range(0, len(fields), 2)]


def read(descriptor: int) -> list[tuple[str, bytes]] | None:
    """The next message, or None where the other side closed before one was whole."""
    head = b""
    while not head.endswith(b":"):
        byte = os.read(descriptor, 1)
        if not byte or len(head) > 12:
            return None
        head += byte
    left = int(head[:-1])
    if left > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {left} bytes")
    parts = []
    while left:
        part = os.read(descriptor, min(left, _CHUNK))
        if not part:
            return None
        parts.append(part)
        left -= len(part)
    return decode(b"".join(parts))


def write(descriptor: int, pairs: list[tuple[str, bytes]]) -> None:
    """Sends a message whole.

    Raises:
        OSError: nobody reads any more.
    """
    rest = memoryview(encode(pairs))
    while rest:
        rest = rest[os.write(descriptor, rest) :]
