"""The parent's order for one isolated program, the answers to it, and the watchdog over its limits.

Each message has its length in front. The order is written by `marshal`, which is safe only for data
of a trusted process, and only the parent holds the sending end. The answers come from processes
nearer to the program and are bounded text.

The watchdog sees to the total use of all processes of the program, which the kernel does not limit.
Between two checks a program can exceed a total. The limits of each process always hold.
"""

from __future__ import annotations

import marshal
import os
import stat
import time

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
        read_all: whether root keeps the right to read files of others (see `kernel`).
        repeatable: whether the program lies at the same addresses every time.
        wall_s, cpu_s: seconds; None is no limit. CPU time of all its processes together.
        memory_bytes: of each process and of all together.
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
    repeatable: bool
    wall_s: float | None
    cpu_s: float | None
    memory_bytes: int
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


_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")
_TICK_S, _IDLE_S = 0.05, 0.4
"""Seconds between two checks of a program that computes, and of one that waits."""
_MAX_ENTRIES = 4096
"""Files and directories in a scratch directory that is not a file system of its own."""


class Watchdog:
    """Watches everything below an init process.

    Args:
        order: the limits.
        init: process id of the init process, which is not counted.
        started: `time.monotonic()` from which the wall clock counts.

    Attributes:
        cpu, peak: seconds of CPU and most bytes of memory seen so far.
    """

    def __init__(self, order: Order, init: int, started: float) -> None:
        self._order = order
        self._init = init
        self._end = started + order.wall_s if order.wall_s else float("inf")
        self._tick_s = _TICK_S
        self.cpu = 0.0
        self.peak = 0

    def wait_ms(self) -> int:
        """Return the milliseconds until the next check is due."""
        left = min(self._tick_s, self._end - time.monotonic())
        return max(0, int(1e3 * left) + 1)

    def check(self) -> str:
        """Return the exceeded limit (time, cpu, memory, processes, files), or an empty string."""
        if time.monotonic() >= self._end:
            return "time"
        cpu, memory, tasks, pids = self._sums()
        self.peak = max(self.peak, memory)
        # A waiting program is checked at growing intervals, and often again once it computes.
        self._tick_s = _TICK_S if cpu > self.cpu else min(2 * self._tick_s, _IDLE_S)
        self.cpu = max(cpu, self.cpu)
        if self._order.cpu_s and cpu > self._order.cpu_s:
            return "cpu"
        most = self._order.memory_bytes
        if memory > most and self._proportional(pids) > most:
            return "memory"
        if tasks > self._order.processes:
            return "processes"
        if NAMESPACES not in self._order.mechanisms and self._scratch_is_full(pids):
            return "files"
        return ""

    def _sums(self) -> tuple[float, int, int, list[int]]:
        """Return CPU seconds, bytes of memory, tasks and process ids of all below the init process.

        Memory that processes share counts for each.
        """
        pages = tasks = cpu = 0
        try:  # ticks of the ended processes that the init process collected
            with open(f"/proc/{self._init}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
            cpu = int(fields[13]) + int(fields[14])
        except OSError:
            pass  # it has ended
        pids = descendants(self._init)
        for pid in pids:
            try:
                with open(f"/proc/{pid}/stat", "rb") as file:
                    fields = file.read().rpartition(b")")[2].split()
                with open(f"/proc/{pid}/statm", "rb") as file:
                    memory = file.read().split()
            except OSError:
                continue  # it has ended
            cpu += sum(int(field) for field in fields[11:15])
            tasks += int(fields[17])
            pages += int(memory[1])
        return cpu / _TICKS, pages * _PAGE, tasks, pids

    def _proportional(self, pids: list[int]) -> int:
        """Return anonymous memory in bytes; shared memory is divided among the sharers."""
        total = 0
        for pid in pids:
            try:
                with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
                    rows = dict(row.split(b":", 1) for row in file.read().splitlines()[1:])
                shares = (rows[b"Pss_Anon"], rows[b"Pss_Shmem"])
                total += sum(int(share.split()[0]) << 10 for share in shares)
            except (OSError, KeyError):
                continue  # it has ended
        return total

    def _scratch_is_full(self, pids: list[int]) -> bool:
        total = entries = 0
        stack = [os.fsencode(self._order.scratch)]
        while stack:
            try:
                with os.scandir(stack.pop()) as rows:
                    for row in rows:
                        entries += 1
                        if entries > _MAX_ENTRIES:
                            return True
                        if row.is_dir(follow_symlinks=False):
                            stack.append(row.path)
                        else:
                            total += row.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:
                continue  # it is gone
            except OSError:
                return True  # too deep to scan, or made unreadable
        return total + self._removed_bytes(pids) > self._order.file_bytes

    def _removed_bytes(self, pids: list[int]) -> int:
        """Return the bytes of removed files that are still open."""
        sizes = {}
        for pid in pids:
            try:
                for name in os.listdir(f"/proc/{pid}/fd"):
                    status = os.stat(f"/proc/{pid}/fd/{name}")
                    if stat.S_ISREG(status.st_mode) and status.st_nlink == 0:
                        sizes[status.st_ino] = status.st_blocks * 512
            except OSError:
                continue  # it has ended or was closed
        return sum(sizes.values())


def descendants(root: int) -> list[int]:
    """Return the process ids of all below `root`, which adopts orphans; zombies included."""
    found, stack = [], [root]
    children = _children if os.path.exists(f"/proc/{root}/task/{root}/children") else _by_parent()
    while stack:
        pids = children(stack.pop())
        found += pids
        stack += pids
    return found


def _children(pid: int) -> list[int]:
    pids = []
    try:
        for task in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                pids += [int(word) for word in file.read().split()]
    except OSError:
        return pids  # it has ended
    return pids


def _by_parent() -> Callable[[int], list[int]]:
    """Group all processes by parent, for a kernel that does not list children."""
    rows: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue  # it has ended
            rows.setdefault(parent, []).append(int(name))
    return lambda pid: rows.get(pid, [])
