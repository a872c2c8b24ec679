"""System calls without a function in Python; the root, the limits and the rights of a process.

The child is cloned into new user, PID, network, mount, IPC and UTS namespaces. It builds its root
on a small tmpfs. The readable trees are mounted read-only at their own paths, /scratch is a second
tmpfs with a limit, and there are a few harmless devices, but no /proc and no /sys. Mounts need
Linux 5.12.

Landlock restricts which files a process and its descendants may open, beyond their user's rights.
Rights that the kernel does not know are left out. `landlock_abi` returns the kernel's version:

1: Linux 5.13. 2: moving between directories, 5.19. 3: truncating, 6.2. 4: TCP, 6.7. 5: ioctl on
devices, 6.10. 6: abstract sockets and signals, 6.12.
"""

from __future__ import annotations

import ctypes
import os
import resource

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

X86 = os.uname().machine == "x86_64"
NR_CLONE = 56 if X86 else 220
NR_PIVOT_ROOT = 155 if X86 else 41
NR_CAPSET = 126 if X86 else 91
NR_PERSONALITY = 135 if X86 else 92
NR_KEYCTL = 250 if X86 else 219
NR_SECCOMP = 317 if X86 else 277
NR_SETHOSTNAME = 170 if X86 else 161
NR_OPEN_TREE, NR_MOVE_MOUNT, NR_MOUNT_SETATTR = 428, 429, 442
NR_LANDLOCK_CREATE, NR_LANDLOCK_ADD, NR_LANDLOCK_RESTRICT = 444, 445, 446

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_CAPBSET_DROP = 1, 4, 8, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47

SIGKILL, SIGTERM, SIGCHLD = 9, 15, 17
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES = 64
_ADDR_NO_RANDOMIZE = 0x0040000


class CallFailed(OSError):
    """A system call failed; `what` names its purpose."""

    def __init__(self, what: str, number: int) -> None:
        self.what = what
        super().__init__(number, f"{what}: {os.strerror(number)}")


def call(what: str, number: int, *arguments: object) -> int:
    """Make a system call by its number.

    Raises:
        CallFailed: it returned an error.
    """
    # A whole register for a number: the upper half of a plain int is undefined.
    registers = (ctypes.c_long(a) if isinstance(a, int) else a for a in arguments)
    return _checked(what, _libc.syscall(ctypes.c_long(number), *registers))


def _checked(what: str, result: int) -> int:
    """Return the result of a call; raise CallFailed if it is an error."""
    if result < 0:
        raise CallFailed(what, ctypes.get_errno())
    return result


def prctl(what: str, option: int, argument: int = 0, second: int = 0) -> None:
    """Call `prctl`. Raises CallFailed if the kernel refuses."""
    values = [ctypes.c_ulong(value) for value in (argument, second, 0, 0)]
    _checked(what, _libc.prctl(option, *values))


def mount(source: bytes | None, target: bytes, kind: bytes | None, flags: int, data: bytes) -> None:
    """Call `mount`. Raises CallFailed if the kernel refuses."""
    result = _libc.mount(source, target, kind, ctypes.c_ulong(flags), data)
    _checked(f"mount on {target.decode()}", result)


def clone(flags: int) -> int:
    """Fork into new namespaces; return 0 in the child and the child's process id in the parent."""
    return call("new namespaces", NR_CLONE, flags | SIGCHLD, 0, 0, 0, 0)


def forget_keys() -> None:
    """Start a session keyring of its own, so that the parent's keys are out of reach."""
    try:
        call("a new session keyring", NR_KEYCTL, 1, None)
    except CallFailed:
        return  # a kernel without keys, or an outer filter that refuses the call


def install_filter(program: bytes) -> None:
    """Install a seccomp filter (see `sampler.sandbox.filter`) on this process for good.

    Raises:
        CallFailed: the kernel has no filters.
    """

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    whole = Program(len(program) // 8, program)
    call("seccomp filter", NR_SECCOMP, 1, 0, ctypes.byref(whole))


FLAGS = 0x10000000 | 0x20000000 | 0x40000000 | 0x00020000 | 0x08000000 | 0x04000000
"""CLONE_NEWUSER, NEWPID, NEWNET, NEWNS, NEWIPC, NEWUTS."""
INSIDE_ID = 1000
"""User and group of the isolated program, as it sees them."""
SCRATCH = b"/scratch"
_NAME = b"sandbox"
DEVICES = [b"/dev/null", b"/dev/zero", b"/dev/full", b"/dev/random", b"/dev/urandom"]
_BUILD_AT = b"/proc"
"""Mount point of the new root until it becomes the root; every Linux has this directory."""
_MS_NOSUID, _MS_NODEV, _MS_REC, _MS_PRIVATE = 2, 4, 1 << 14, 1 << 18
_RDONLY, _NOSUID, _NODEV, _NOEXEC = 1, 2, 4, 8
_AT_EMPTY_PATH, _AT_RECURSIVE, _AT_FDCWD = 0x1000, 0x8000, -100
_OPEN_TREE_CLONE, _MOVE_EMPTY_PATH = 1, 4
_MAX_FILES = 4096


def map_ids(child: int, outside: int, group: int) -> None:
    """Map the child's user and group to ids outside of the namespace; the parent calls this."""
    if os.geteuid() != 0:  # required of an ordinary user to map its group
        with open(f"/proc/{child}/setgroups", "w") as file:
            file.write("deny")
    for name, number in (("uid_map", outside), ("gid_map", group)):
        with open(f"/proc/{child}/{name}", "w") as file:
            file.write(f"{INSIDE_ID} {number} 1")


def build_root(readable: list[bytes], links: list[tuple[bytes, bytes]], scratch_bytes: int) -> None:
    """Turn the newly cloned process into user INSIDE_ID with a root file system of its own.

    Args:
        readable: real paths of files and directories, none below another.
        links: (path, target) of symbolic links to create besides them.
        scratch_bytes: capacity of /scratch.

    Raises:
        OSError: a path cannot be read here, or the kernel refuses a mount.
    """
    mount(None, b"/", None, _MS_REC | _MS_PRIVATE, b"")
    # Before the change of user, because only the old user may reach some of these paths.
    trees = [(path, _tree(path, _RDONLY | _NOSUID | _NODEV)) for path in readable]
    trees += [(path, _tree(path, _NOSUID | _NOEXEC)) for path in DEVICES if os.path.exists(path)]
    with open("/proc/self/setgroups") as file:
        if file.read().strip() == "allow":
            os.setgroups([])
    os.setresgid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    os.setresuid(INSIDE_ID, INSIDE_ID, INSIDE_ID)
    try:  # nested user namespaces would give the dropped capabilities back
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
    except OSError:
        pass  # /proc/sys is read-only in some containers; the filter refuses namespaces too
    flags = _MS_NOSUID | _MS_NODEV
    mount(b"tmpfs", _BUILD_AT, b"tmpfs", flags, b"size=1m,nr_inodes=4k,mode=0755")
    os.chdir(_BUILD_AT)
    for path, tree in trees:
        _place(tree, path[1:])
    os.mkdir(SCRATCH[1:])
    size = b"size=%d,nr_inodes=%d,mode=0755" % (scratch_bytes, _MAX_FILES)
    mount(b"tmpfs", SCRATCH[1:], b"tmpfs", flags, size)
    shared = [(b"/tmp", SCRATCH), (b"/dev/shm", SCRATCH)]
    for path, target in [*links, *shared]:
        os.makedirs(os.path.dirname(path[1:]) or b".", exist_ok=True)
        if not os.path.lexists(path[1:]):
            os.symlink(target, path[1:])
    call("changing the root", NR_PIVOT_ROOT, b".", b".")
    _checked("taking the old root away", _libc.umount2(b".", 2))  # MNT_DETACH, with all below
    os.chdir(b"/")
    _set_attributes(os.open(b"/", os.O_PATH | os.O_CLOEXEC), _RDONLY, 0)
    call("naming the machine", NR_SETHOSTNAME, _NAME, len(_NAME))


def _tree(path: bytes, attributes: int) -> int:
    """Return a detached copy of the mount of a path, with these attributes throughout."""
    flags = _OPEN_TREE_CLONE | _AT_RECURSIVE | os.O_CLOEXEC
    what = f"mounting {os.fsdecode(path)}"
    tree = call(what, NR_OPEN_TREE, _AT_FDCWD, path, flags)
    _set_attributes(tree, attributes, _AT_RECURSIVE)
    return tree


def _set_attributes(tree: int, attributes: int, flags: int) -> None:
    request = ctypes.byref((ctypes.c_uint64 * 4)(attributes, 0, 0, 0))
    call("read-only mounts", NR_MOUNT_SETATTR, tree, b"", _AT_EMPTY_PATH | flags, request, 32)


def _place(tree: int, at: bytes) -> None:
    if os.stat(tree).st_mode & 0o170000 == 0o040000:
        os.makedirs(at, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(at), exist_ok=True)
        os.close(os.open(at, os.O_CREAT | os.O_WRONLY, 0o644))
    what = f"mounting /{os.fsdecode(at)}"
    call(what, NR_MOVE_MOUNT, tree, b"", _AT_FDCWD, at, _MOVE_EMPTY_PATH)
    os.close(tree)


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


def fix_addresses() -> None:
    """Have what this process becomes lie at the same addresses every time.

    Raises:
        CallFailed: the kernel refuses, as a container's filter may.
    """
    call("fixed addresses (personality)", NR_PERSONALITY, _ADDR_NO_RANDOMIZE)


def die_first() -> None:
    """Have the kernel kill this process and its children first if memory runs out."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:
        return  # /proc is read-only in some containers


def set_limits(memory: int, file: int, cpu: int, tasks: int) -> None:
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
    try:
        for capability in range(_CAPABILITIES):
            if not keep >> capability & 1:
                prctl("bounding set", PR_CAPBSET_DROP, capability)
    except CallFailed:
        pass  # no further capability; or not permitted, then no_new_privs protects alone
    if user != os.geteuid():
        os.setgroups([])
        prctl("keeping a capability", PR_SET_KEEPCAPS, 1)
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    # Permitted, effective and inheritable: bits 0 to 31, then 32 to 63.
    head = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(keep, keep, keep, 0, 0, 0)
    call("giving up capabilities", NR_CAPSET, ctypes.byref(head), ctypes.byref(data))
    if keep:
        prctl("keeping a capability", PR_CAP_AMBIENT, 2, 2)
    prctl("no new privileges", PR_SET_NO_NEW_PRIVS, 1)


def landlock_abi() -> int:
    """Return Landlock's version here; 0 without it."""
    try:
        return call("Landlock", NR_LANDLOCK_CREATE, None, 0, _LANDLOCK_VERSION)
    except CallFailed:
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
    ruleset = call("Landlock", NR_LANDLOCK_CREATE, ctypes.byref(handled), size, 0)
    for path in readable:
        _allow_path(ruleset, path, EXECUTE | READ_FILE | READ_DIR)
    for path in writable:
        _allow_path(ruleset, path, rights & ~(_MAKE_CHAR | _MAKE_BLOCK))
    for path in devices:
        _allow_path(ruleset, path, READ_FILE | WRITE_FILE)
    call("Landlock", NR_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow_path(ruleset: int, path: bytes, rights: int) -> None:
    class Beneath(ctypes.Structure):
        _pack_ = 1
        _fields_ = [("rights", ctypes.c_uint64), ("descriptor", ctypes.c_int32)]

    descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        directory = os.stat(descriptor).st_mode & 0o170000 == 0o040000
        rule = Beneath(rights if directory else rights & _FILE_RIGHTS, descriptor)
        call("Landlock rule", NR_LANDLOCK_ADD, ruleset, 1, ctypes.byref(rule), 0)
    finally:
        os.close(descriptor)
