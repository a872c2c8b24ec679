"""System calls without a function in Python, and namespaces with a root of read-only mounts.

The child is cloned into new user, PID, network, mount, IPC and UTS namespaces. It builds its root
on a small tmpfs. The readable trees are mounted read-only at their own paths, /scratch is a second
tmpfs with a limit, and there are a few harmless devices, but no /proc and no /sys. Mounts need
Linux 5.12.
"""

from __future__ import annotations

import ctypes
import os

_libc = ctypes.PyDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long

X86 = os.uname().machine == "x86_64"
NR_CLONE = 56 if X86 else 220
NR_PIVOT_ROOT = 155 if X86 else 41
NR_CAPSET = 126 if X86 else 91
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


def detach(target: bytes) -> None:
    """Detach a mount with all that is mounted below it."""
    _checked("taking the old root away", _libc.umount2(target, 2))


def clone(flags: int) -> int:
    """Fork into new namespaces; return 0 in the child and the child's process id in the parent."""
    return call("new namespaces", NR_CLONE, flags | SIGCHLD, 0, 0, 0, 0)


def set_capabilities(mask: int) -> None:
    """Set permitted, effective and inheritable capabilities to `mask` (bits 0 to 31)."""
    head = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)
    call("giving up capabilities", NR_CAPSET, ctypes.byref(head), ctypes.byref(data))


def drop_bounding_set(keep: int) -> None:
    """Prevent later programs from gaining any capability except those of `keep`."""
    for capability in range(_CAPABILITIES):
        if keep >> capability & 1:
            continue
        try:
            prctl("bounding set", PR_CAPBSET_DROP, capability)
        except CallFailed:
            return  # no further capability; or not permitted, then no_new_privs protects alone


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
    _no_more_namespaces()
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
    detach(b".")
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
    request = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    call(
        "read-only mounts",
        NR_MOUNT_SETATTR,
        tree,
        b"",
        _AT_EMPTY_PATH | flags,
        ctypes.byref(request),
        32,
    )


def _place(tree: int, at: bytes) -> None:
    if os.stat(tree).st_mode & 0o170000 == 0o040000:
        os.makedirs(at, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(at), exist_ok=True)
        os.close(os.open(at, os.O_CREAT | os.O_WRONLY, 0o644))
    what = f"mounting /{os.fsdecode(at)}"
    call(what, NR_MOVE_MOUNT, tree, b"", _AT_FDCWD, at, _MOVE_EMPTY_PATH)
    os.close(tree)


def _no_more_namespaces() -> None:
    """Forbid nested user namespaces, which would give the dropped capabilities back."""
    try:
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("0")
    except OSError:
        return  # /proc/sys is read-only in some containers; the filter refuses namespaces too
