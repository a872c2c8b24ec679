"""Resource limits of a process, its user, and what it may still do afterwards."""

from __future__ import annotations

import os
import resource

from . import kernel

OPEN_FILES = 256
_STACK_BYTES = 8 << 20
_NO_CORE = 1
"""A limit of 1 byte and not of 0: only that also keeps a core handler from being started."""
READ_ALL = 1 << 2
"""CAP_DAC_READ_SEARCH: reading what permissions would forbid (Landlock still says what opens)."""
_CHANGE_USER = 1 << 0 | 1 << 6 | 1 << 7
"""CAP_CHOWN, CAP_SETGID, CAP_SETUID."""
ROOT_STAYS_ROOT = "this is root, and may not become another user"
_SLACK = 256
_USERS_FROM, _USERS = 1_700_000_000, 1 << 22
_COUNTS_BY_NAMESPACE = (5, 14)


def spare_user() -> int:
    """A user id that nobody else has here, for a process that starts as root: its own id makes
    the count of processes its own, and owns no file. The own id where there is none to spare.

    Raises:
        PermissionError: root, for whom the kernel counts no processes, and not allowed to become
            another user.
    """
    if os.geteuid() != 0:
        return os.geteuid()
    wanted = _USERS_FROM + os.getpid() % _USERS
    with open("/proc/self/uid_map") as file:
        rows = [[int(word) for word in row.split()] for row in file]
    if capabilities() & _CHANGE_USER == _CHANGE_USER and any(
        first <= wanted < first + count for first, _, count in rows
    ):
        return wanted
    if any(first == outside == 0 for first, outside, _ in rows):
        raise PermissionError(ROOT_STAYS_ROOT)
    return 0


def capabilities() -> int:
    """The effective capabilities of this process, a bit each."""
    with open("/proc/self/status") as file:
        return next(int(row.split()[1], 16) for row in file if row.startswith("CapEff:"))


def tasks_allowed(processes: int, user: int, *, contained: bool) -> int:
    """The limit on the user's tasks that leaves `processes` to the program. Where the user has
    others, whose number changes, it is wide, and the supervisor counts (see `watch`)."""
    if contained and counts_by_namespace():
        return processes + 1  # the guard
    if user != os.geteuid():
        return processes + contained
    return tasks_of(user) + processes + _SLACK


def counts_by_namespace() -> bool:
    """Whether a user namespace has a count of processes of its own."""
    release = os.uname().release.split(".")
    return (int(release[0]), int("".join(c for c in release[1] if c.isdigit()))) >= (
        _COUNTS_BY_NAMESPACE
    )


def tasks_of(user: int) -> int:
    """Processes and threads that run as a user now."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == user:
                    total += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue  # ended meanwhile
    return total


def die_first() -> None:
    """Where the machine runs out of memory, the kernel takes this process and its children before
    any other."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        return  # /proc is read-only in some containers


def apply(memory: int, file: int, cpu: int, tasks: int) -> None:
    """Limits of this process and of each that it starts.

    Args:
        memory: bytes of address space, each process.
        file: bytes of a file that it writes.
        cpu: seconds of CPU, each process; 0 is no limit.
        tasks: processes and threads of the user, all together.
    """
    wanted = [
        (resource.RLIMIT_AS, memory, memory),
        (resource.RLIMIT_FSIZE, file, file),
        (resource.RLIMIT_NPROC, tasks, tasks),
        (resource.RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES),
        (resource.RLIMIT_STACK, _STACK_BYTES, _STACK_BYTES),
        (resource.RLIMIT_CORE, _NO_CORE, _NO_CORE),
        (resource.RLIMIT_MEMLOCK, 0, 0),
        (resource.RLIMIT_MSGQUEUE, 0, 0),
    ]
    if cpu:
        wanted.append((resource.RLIMIT_CPU, cpu, cpu + 1))
    for name, soft, hard in wanted:
        most = resource.getrlimit(name)[1]
        if most != resource.RLIM_INFINITY:
            soft, hard = min(soft, most), min(hard, most)
        resource.setrlimit(name, (soft, hard))


def give_up_rights(user: int, *, read_all: bool) -> None:
    """Becomes `user` where this is root outside of namespaces, without any capability but, with
    `read_all`, that of reading what only root may: an interpreter below /root. No program that
    is started can gain one.

    Raises:
        CallFailed: the kernel refuses.
    """
    keep = READ_ALL if read_all else 0
    kernel.drop_bounding_set(keep)
    if user != os.geteuid():
        os.setgroups([])
        kernel.prctl("keeping a capability", kernel.PR_SET_KEEPCAPS, 1)
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    kernel.set_capabilities(keep)
    if keep:
        kernel.prctl("keeping a capability", kernel.PR_CAP_AMBIENT, 2, 2)
    kernel.prctl("no new privileges", kernel.PR_SET_NO_NEW_PRIVS, 1)
