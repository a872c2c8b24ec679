"""System calls that Python has no function for."""

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
NR_OPEN_TREE, NR_MOVE_MOUNT, NR_MOUNT_SETATTR = 428, 429, 442
NR_LANDLOCK_CREATE, NR_LANDLOCK_ADD, NR_LANDLOCK_RESTRICT = 444, 445, 446

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_KEEPCAPS, PR_CAPBSET_DROP = 1, 4, 8, 24
PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT = 36, 38, 47

SIGKILL, SIGTERM, SIGCHLD = 9, 15, 17
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITIES = 64


class CallFailed(OSError):
    """A system call failed; `what` says what it was for."""

    def __init__(self, what: str, number: int) -> None:
        self.what = what
        super().__init__(number, f"{what}: {os.strerror(number)}")


def call(what: str, number: int, *arguments: object) -> int:
    """A system call by its number.

    Raises:
        CallFailed: it returned an error.
    """
    result: int = _libc.syscall(ctypes.c_long(number), *map(_argument, arguments))
    if result < 0:
        raise CallFailed(what, ctypes.get_errno())
    return result


def _argument(value: object) -> object:
    """A whole register for a number: the upper half of a plain int's is undefined."""
    return ctypes.c_long(value) if isinstance(value, int) else value


def prctl(what: str, option: int, argument: int = 0, second: int = 0) -> None:
    """Raises CallFailed where the kernel refuses."""
    values = [ctypes.c_ulong(value) for value in (argument, second, 0, 0)]
    if _libc.prctl(option, *values) < 0:
        raise CallFailed(what, ctypes.get_errno())


def mount(source: bytes | None, target: bytes, kind: bytes | None, flags: int, data: bytes) -> None:
    """Raises CallFailed where the kernel refuses."""
    if _libc.mount(source, target, kind, ctypes.c_ulong(flags), data) < 0:
        raise CallFailed(f"mount on {target.decode()}", ctypes.get_errno())


def detach(target: bytes) -> None:
    """Takes a mount away, with all that is mounted below it."""
    if _libc.umount2(target, 2) < 0:
        raise CallFailed("taking the old root away", ctypes.get_errno())


def clone(flags: int) -> int:
    """fork() into new namespaces: 0 in the child, the child's process id in the parent."""
    return call("new namespaces", NR_CLONE, flags | SIGCHLD, 0, 0, 0, 0)


def set_capabilities(mask: int) -> None:
    """Permitted, effective and inheritable capabilities become `mask` (bits 0 to 31)."""
    head = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    data = (ctypes.c_uint32 * 6)(mask, mask, mask, 0, 0, 0)
    call("giving up capabilities", NR_CAPSET, ctypes.byref(head), ctypes.byref(data))


def drop_bounding_set(keep: int) -> None:
    """No program that is started later can gain a capability but those of `keep`."""
    for capability in range(_CAPABILITIES):
        if keep >> capability & 1:
            continue
        try:
            prctl("bounding set", PR_CAPBSET_DROP, capability)
        except CallFailed:
            return  # above the last one; or no right to, and then no_new_privs has to do


def forget_keys() -> None:
    """A session keyring of its own: the parent's keys are out of reach."""
    try:
        call("a new session keyring", NR_KEYCTL, 1, None)
    except CallFailed:
        return  # a kernel without keys, or a filter around this machine that refuses the call


def install_filter(program: bytes) -> None:
    """Puts a seccomp filter (see `sampler.sandbox.filter`) on this process, for good.

    Raises:
        CallFailed: no filters here.
    """

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    whole = Program(len(program) // 8, program)
    call("seccomp filter", NR_SECCOMP, 1, 0, ctypes.byref(whole))
