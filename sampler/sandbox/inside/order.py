"""What the parent orders: one isolated program, as it crosses to the launcher."""

from __future__ import annotations

NAMESPACES, LANDLOCK, SECCOMP = "namespaces", "landlock", "seccomp"


class Order:
    """The fields of a message (see `wire`), typed.

    Attributes:
        command: the program and its arguments.
        files: (path below the scratch directory, content) of what lies there at the start.
        readable: real paths that it may read, none below another.
        links: (path, target) of the symbolic links on the way to them.
        mechanisms: which of NAMESPACES, LANDLOCK, SECCOMP apply.
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
        self.environment: list[tuple[bytes, bytes]] = []
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


def pack(order: Order) -> list[tuple[str, bytes]]:
    """The order as pairs of bytes."""
    pairs = [("command", word) for word in order.command]
    pairs += [("readable", path) for path in order.readable]
    pairs += [("mechanism", name.encode()) for name in order.mechanisms]
    for kind, rows in (
        ("environment", order.environment),
        ("file", order.files),
        ("link", order.links),
    ):
        pairs += [(kind, part) for row in rows for part in row]
    pairs += [("filter", order.filter), ("scratch", order.scratch)]
    pairs += [
        (name, str(getattr(order, name)).encode())
        for name in ("wall_s", "cpu_s", "memory", "processes", "file_bytes")
    ]
    return [*pairs, ("read_all", b"1" if order.read_all else b"")]


def unpack(pairs: list[tuple[str, bytes]]) -> Order:
    """The order again; the counterpart of `pack`."""
    lists: dict[str, list[bytes]] = {}
    for key, value in pairs:
        lists.setdefault(key, []).append(value)
    order = Order()
    order.command = lists["command"]
    order.readable = lists.get("readable", [])
    order.mechanisms = [name.decode() for name in lists.get("mechanism", [])]
    order.environment = _paired(lists.get("environment", []))
    order.files = _paired(lists.get("file", []))
    order.links = _paired(lists.get("link", []))
    order.filter, order.scratch = lists["filter"][0], lists["scratch"][0]
    order.wall_s, order.cpu_s = float(lists["wall_s"][0]), float(lists["cpu_s"][0])
    order.memory, order.processes = int(lists["memory"][0]), int(lists["processes"][0])
    order.file_bytes = int(lists["file_bytes"][0])
    order.read_all = lists["read_all"][0] == b"1"
    return order


def _paired(flat: list[bytes]) -> list[tuple[bytes, bytes]]:
    return [(flat[i], flat[i + 1]) for i in range(0, len(flat), 2)]
