"""System calls without a function in Python."""

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
