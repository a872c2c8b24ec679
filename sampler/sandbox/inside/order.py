"""What the parent orders: one isolated program, as it crosses to the launcher."""

from __future__ import annotations

NAMESPACES, LANDLOCK, SECCOMP = "namespaces", "landlock", "seccomp"


class Order:
    """The fields of a message (see `wire`), typed: what `marshal` writes.

    Attributes:
        command: the program and its arguments.
        files: (path below the scratch directory, content) of what lies there at the start.
        readable: real paths that it may read, none below another.
        links: (path, target) of the symbolic links on the way to them.
        mechanisms: which of NAMESPACES, LANDLOCK, SECCOMP apply; with none only the limits do.
        filter: the seccomp program.
        scratch: the scratch directory outside of namespaces; empty inside.
        read_all: root has to keep the right to read what other users may not (see `limits`).
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

    def isolates(self, mechanism: str) -> bool:
        """Whether a mechanism applies."""
        return mechanism in self.mechanisms


def unpack(fields: dict[str, object]) -> Order:
    """The order whose `vars` crossed as a message."""
    order = Order()
    vars(order).update(fields)
    return order
