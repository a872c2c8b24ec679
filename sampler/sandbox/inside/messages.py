"""Messages between the parent, the launcher and the init process, each with its length in front.

The parent's order describes one isolated program. It is written by `marshal`, which is safe only
for data of a trusted process, and only the parent holds the sending end. The answers come from
processes nearer to the program and are bounded text.
"""

from __future__ import annotations

import marshal
import os

TYPE_CHECKING = False
if TYPE_CHECKING:  # without the import of `typing`
    from collections.abc import Callable
    from typing import Any

NAMESPACES, LANDLOCK, SECCOMP = "namespaces", "landlock", "seccomp"
MAX_ANSWER_BYTES = 64 * 1024
_LENGTH_BYTES = 8


class Order:
    """Order of the parent for one isolated program, as typed fields that `marshal` writes.

    Attributes:
        command: the program and its arguments.
        files: (path below the scratch directory, content) of files that exist at the start.
        readable: real paths that it may read, none below another.
        links: (path, target) of the symbolic links on the way to them.
        mechanisms: which of NAMESPACES, LANDLOCK, SECCOMP apply; if none, only the limits do.
        filter: the seccomp program.
        scratch: the scratch directory outside of namespaces; empty inside.
        read_all: whether root keeps the right to read files of others (see `limits`).
        wall_s, cpu_s: seconds; 0 is no limit. CPU time of all its processes together.
        memory: bytes, of each process and of all together.
        processes: processes and threads at a time.
        file_bytes: of a file, and of the scratch directory.
    """

    command: list[bytes]
    environment: dict[bytes, bytes]
    files: list[tuple[bytes, bytes]]
    readable: list[bytes]
    links: list[tuple[bytes, bytes]]
    mechanisms: list[str]
    filter: bytes
    scratch: bytes
    read_all: bool
    wall_s: float
    cpu_s: float
    memory: int
    processes: int
    file_bytes: int

    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def encode_order(order: Order) -> bytes:
    """Encode an order, whose fields are plain values."""
    return _framed(marshal.dumps(vars(order)))


def read_order(source: Any, receive: Callable[[Any, int], bytes] = os.read) -> Order | None:
    """Read the parent's order; None if the parent closed before it was complete.

    Args:
        source: a descriptor, or another argument for `receive`.
        receive: returns at most a number of bytes of the source, none at its end.
    """
    body = _exactly(source, receive, _size(source, receive))
    return Order(**marshal.loads(body)) if body else None  # noqa: S302 - only the parent writes it


def answer(descriptor: int, **fields: str | float) -> None:
    """Send names and values back.

    Raises:
        OSError: the other side has closed its end.
    """
    lines = (f"{name} {str(value)[:4096]}".replace("\n", " ") for name, value in fields.items())
    rest = memoryview(_framed("\n".join(lines).encode(errors="replace")))
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def read_answer(source: Any, receive: Callable[[Any, int], bytes] = os.read) -> dict[str, str]:
    """Read the next answer; empty if the other side closed before it was complete."""
    size = _size(source, receive)
    if size > MAX_ANSWER_BYTES:
        return {}
    lines = _exactly(source, receive, size).decode(errors="replace").splitlines()
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def _size(source: Any, receive: Callable[[Any, int], bytes]) -> int:
    return int.from_bytes(_exactly(source, receive, _LENGTH_BYTES), "big")


def _exactly(source: Any, receive: Callable[[Any, int], bytes], size: int) -> bytes:
    """Return so many bytes; none if the end comes before."""
    parts = []
    while size:
        part = receive(source, size)
        if not part:
            return b""
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
