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

    def __init__(self) -> None:
        self.command: list[bytes] = []
        self.environment: dict[bytes, bytes] = {}
        self.files: list[tuple[bytes, bytes]] = []
        self.readable: list[bytes] = []
        self.links: list[tuple[bytes, bytes]] = []
        self.mechanisms: list[str] = []
        self.filter = b""
        self.scratch = b""
        self.read_all = False
        self.wall_s = 0.0
        self.cpu_s = 0.0
        self.memory = 0
        self.processes = 1
        self.file_bytes = 0


def unpack(fields: dict[str, object]) -> Order:
    """Return the order whose `vars` crossed as a message."""
    order = Order()
    vars(order).update(fields)
    return order


def encode_order(fields: dict[str, Any]) -> bytes:
    """Encode the fields of an order, which are plain values."""
    return _framed(marshal.dumps(fields))


def read_order(source: Any, receive: Callable[[Any, int], bytes] = os.read) -> dict[str, Any]:
    """Read the parent's order; empty if the parent closed before it was complete.

    Args:
        source: a descriptor, or another argument for `receive`.
        receive: returns at most a number of bytes of the source, none at its end.
    """
    body = _body(source, receive, None)
    return marshal.loads(body) if body else {}  # noqa: S302 - only the parent writes it


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
    lines = _body(source, receive, MAX_ANSWER_BYTES).decode(errors="replace").splitlines()
    return {name: value for name, _, value in (line.partition(" ") for line in lines)}


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(_LENGTH_BYTES, "big") + data


def _body(source: Any, receive: Callable[[Any, int], bytes], most: int | None) -> bytes:
    size = int.from_bytes(_exactly(source, receive, _LENGTH_BYTES), "big")
    return b"" if most is not None and size > most else _exactly(source, receive, size)


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
