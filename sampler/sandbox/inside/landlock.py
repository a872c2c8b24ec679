"""Landlock: which files a process and its descendants may open, whatever their owner may.

Rights that a kernel does not know yet are left out: `abi` says what there is (1: Linux 5.13,
2: moving between directories 5.19, 3: truncating 6.2, 4: TCP 6.7, 5: ioctl on devices 6.10,
6: abstract sockets and signals 6.12).
"""

from __future__ import annotations

import ctypes
import os

from . import kernel

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_MAKE_CHAR, _MAKE_BLOCK, _TRUNCATE = 1 << 6, 1 << 11, 1 << 14
_FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | _TRUNCATE
_RIGHTS_BY_ABI = {1: 13, 2: 14, 3: 15, 4: 15}
_RIGHTS = 16  # from ABI 5
_VERSION = 1


def abi() -> int:
    """Landlock's version here; 0 without it."""
    try:
        return kernel.call("Landlock", kernel.NR_LANDLOCK_CREATE, None, 0, _VERSION)
    except kernel.CallFailed:
        return 0


def restrict(readable: list[bytes], writable: list[bytes], devices: list[bytes]) -> None:
    """From now on only these paths open: `readable` to read and execute, `writable` to change
    as well, `devices` to read and write. No TCP, no abstract socket of outside, no signal to
    outside, as far as the kernel knows those. Needs no_new_privs.

    Raises:
        CallFailed, OSError: no Landlock here, or a path that is not there.
    """
    version = abi()
    rights = (1 << _RIGHTS_BY_ABI.get(version, _RIGHTS)) - 1
    handled = (ctypes.c_uint64 * 3)(rights, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = kernel.call("Landlock", kernel.NR_LANDLOCK_CREATE, ctypes.byref(handled), size, 0)
    for path in readable:
        _allow(ruleset, path, EXECUTE | READ_FILE | READ_DIR)
    for path in writable:
        _allow(ruleset, path, rights & ~(_MAKE_CHAR | _MAKE_BLOCK))
    for path in devices:
        _allow(ruleset, path, READ_FILE | WRITE_FILE)
    kernel.call("Landlock", kernel.NR_LANDLOCK_RESTRICT, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: bytes, rights: int) -> None:
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
