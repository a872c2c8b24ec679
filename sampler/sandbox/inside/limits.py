"""Limits and rights of a process: its user, resource limits, capabilities, and Landlock.

Landlock restricts which files a process and its descendants may open, beyond their user's rights.
Rights that the kernel does not know are left out. `landlock_abi` returns the kernel's version:

1: Linux 5.13. 2: moving between directories, 5.19. 3: truncating, 6.2. 4: TCP, 6.7. 5: ioctl on
devices, 6.10. 6: abstract sockets and signals, 6.12.
"""

from __future__ import annotations

import ctypes
import os
import resource

from . import kernel

OPEN_FILES = 256
_STACK_BYTES = 8 << 20
_NO_CORE = 1
"""A limit of 1 byte, because a limit of 0 still starts a core handler."""
READ_ALL = 1 << 2
"""CAP_DAC_READ_SEARCH: reading despite permissions. Landlock still applies."""
_CHANGE_USER = 1 << 0 | 1 << 6 | 1 << 7
"""CAP_CHOWN, CAP_SETGID, CAP_SETUID."""
ROOT_STAYS_ROOT = "this is root, and may not become another user"
_SLACK = 256
_USERS_FROM, _USERS = 1_700_000_000, 1 << 22
_COUNTS_BY_NAMESPACE = (5, 14)
"""First Linux whose user namespaces have a count of processes of their own."""


EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK, _TRUNCATE = 1 << 6, 1 << 11, 1 << 14
_FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | _TRUNCATE
_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15}
_LANDLOCK_RIGHTS = 16  # from ABI 5
_LANDLOCK_VERSION = 1


def spare_user() -> int:
    """Return an unused user id for a process that starts as root; the own id if there is none.

    With a user of its own the process has its own count of processes and owns no file.

    Raises:
        PermissionError: this is root, whose processes the kernel does not count, and it may not
            become another user.
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
    """Return the effective capabilities of this process as bits."""
    with open("/proc/self/status") as file:
        return next(int(row.split()[1], 16) for row in file if row.startswith("CapEff:"))


def tasks_allowed(processes: int, user: int, *, contained: bool) -> int:
    """Return the limit on the user's tasks that leaves `processes` to the program.

    If the user has other tasks, whose number changes, the limit is wide and the watchdog counts.
    """
    release = os.uname().release.split(".")
    version = int(release[0]), int("".join(c for c in release[1] if c.isdigit()))
    if contained and version >= _COUNTS_BY_NAMESPACE:
        return processes + 1  # the init process
    if user != os.geteuid():
        return processes + contained
    return tasks_of(user) + processes + _SLACK


def tasks_of(user: int) -> int:
    """Count the processes and threads of a user."""
    total = 0
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                if os.stat(f"/proc/{name}").st_uid == user:
                    total += len(os.listdir(f"/proc/{name}/task"))
            except OSError:
                continue  # it has ended
    return total


def die_first() -> None:
    """Have the kernel kill this process and its children first if memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        return  # /proc is read-only in some containers


def apply(memory: int, file: int, cpu: int, tasks: int) -> None:
    """Set the limits of this process and of each that it starts.

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
    """Become `user` without capabilities, if this is root outside of namespaces.

    With `read_all` the capability to read files of root remains, for example for an interpreter
    below /root. No started program can gain another capability.

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


def landlock_abi() -> int:
    """Return Landlock's version here; 0 without it."""
    try:
        return kernel.call("Landlock", kernel.NR_LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)
    except kernel.CallFailed:
        return 0


def restrict_files(readable: list[bytes], writable: list[bytes], devices: list[bytes]) -> None:
    """Restrict this process by Landlock, for good; needs no_new_privs.

    Only these paths can be opened: `readable` to read and execute, `writable` to change as well,
    `devices` to read and write. TCP, and abstract sockets and signals to processes outside, are
    refused if the kernel's Landlock covers them.

    Raises:
        CallFailed, OSError: no Landlock here, or a missing path.
    """
    version = landlock_abi()
    rights = (1 << _RIGHTS_BY_ABI.get(version, _LANDLOCK_RIGHTS)) - 1
    handled = (ctypes.c_uint64 * 3)(rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = kernel.call("Landlock", kernel.NR_LANDLOCK_CREATE, ctypes.byref(handled), size, 0)
    for path in readable:
        _allow_path(ruleset, path, EXECUTE | READ_FILE | READ_DIR)
    for path in writable:
        _allow_path(ruleset, path, rights & ~(_MAKE_CHAR | _MAKE_BLOCK))
    for path in devices:
        _allow_path(ruleset, path, READ_FILE | WRITE_FILE)
    kernel.call("Landlock", kernel.NR_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow_path(ruleset: int, path: bytes, rights: int) -> None:
    class Beneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("rights", ctypes.c_uint64), ("descriptor", ctypes.c_int32)]

    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        directory = os.stat(descriptor).st_mode & 0o170000 == 0o040000
        rule = Beneath(rights if directory else rights & _FILE_RIGHTS, descriptor)
        kernel.call("Landlock rule", kernel.NR_LANDLOCK_ADD, ruleset, 1, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)
