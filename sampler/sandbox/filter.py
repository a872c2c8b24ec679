"""The seccomp filter: a BPF program that lets through the calls of `sampler.sandbox.syscalls`.

Everything that is not named there fails with EPERM, or with ENOSYS where a C library has an older
call to fall back to. The kernel remembers which calls pass whatever their arguments, so that the
length of the program costs nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache

from sampler.sandbox.seccomp import (
    ABSENT,
    ALLOW,
    AND,
    ARCHITECTURES,
    DENY,
    EQUAL,
    GREATER,
    SET,
    Instruction,
    allow,
    argument,
    assemble,
    one_of,
)
from sampler.sandbox.syscalls import BY_ARGUMENT, CONTAINED, PLAIN

NEWEST = 462
"""Calls above this number were not there when the tables were written: they are absent."""
_CLONE_REFUSED = 0x7E020000 | 0x00008000 | 0x00002000
"""New namespaces, a child of somebody else's (CLONE_PARENT), a traced child (CLONE_PTRACE)."""
_FCNTL_REFUSED = (8, 10, 15, 1024, 1026)
"""F_SETOWN, F_SETSIG, F_SETOWN_EX (a descriptor that signals another process), F_SETLEASE,
F_NOTIFY (both reach files that others use)."""
_IOCTL_REFUSED = (0x5412, 0x541C, 0x8901, 0x8902)
"""TIOCSTI, TIOCLINUX (typing into a terminal), FIOSETOWN, SIOCSPGRP (as F_SETOWN)."""
_PRCTL_ALLOWED = (3, 15, 16, 23)
"""PR_GET_DUMPABLE, PR_SET_NAME, PR_GET_NAME, PR_CAPBSET_READ."""
_O_TRUNC, _O_ACCMODE = 0x200, 3
_AF_UNIX, _SOCK_STREAM, _SOCK_TYPE = 1, 1, 0xF


def supported() -> bool:
    """Whether a filter can be built for this machine's architecture."""
    return os.uname().machine in ARCHITECTURES


@cache
def build(*, contained: bool, signals_scoped: bool, machine: str = "") -> bytes:
    """The filter as the kernel takes it: 8 bytes an instruction.

    Args:
        contained: PID, mount and IPC namespaces hold as well.
        signals_scoped: Landlock keeps signals inside (ABI 6); where neither it nor a PID namespace
            does, a process signals nobody but its own group as a whole.
        machine: as `uname -m` says; this machine's where empty.

    Raises:
        KeyError: no table for this architecture.
    """
    machine = machine or os.uname().machine
    column, _ = ARCHITECTURES[machine]
    program: list[Instruction] = []
    for name, body in _byargument(free_signals=contained or signals_scoped).items():
        number = BY_ARGUMENT[name][column]
        if number is not None:
            program += [(EQUAL, 0, len(body), number), *body]
    rows = [*PLAIN.values(), *(CONTAINED.values() if contained else ())]
    program += allow(row[column] for row in rows)
    program += [(GREATER, 0, 1, NEWEST), ABSENT, DENY]
    return assemble(program, machine)


def _byargument(*, free_signals: bool) -> dict[str, list[Instruction]]:
    """What follows once the call's number has matched; each ends with a verdict."""
    signal = [ALLOW] if free_signals else one_of(0, (0,))
    return {
        "clone3": [ABSENT],  # its flags lie in memory, where a filter cannot look
        "openat2": [ABSENT],
        "clone": [argument(0), (SET, 0, 1, _CLONE_REFUSED), DENY, ALLOW],
        "open": _no_truncation(1),
        "openat": _no_truncation(2),
        "creat": [ALLOW],
        "fcntl": _none_of(1, _FCNTL_REFUSED),
        "ioctl": _none_of(1, _IOCTL_REFUSED),
        "prctl": one_of(0, _PRCTL_ALLOWED),
        "prlimit64": one_of(0, (0,)),  # its own limits, not another process's
        # A pair of streams is connected to itself; a pair of datagram sockets can send elsewhere.
        "socketpair": [
            argument(0),
            (EQUAL, 1, 0, _AF_UNIX),
            DENY,
            argument(1),
            (AND, 0, 0, _SOCK_TYPE),
            (EQUAL, 0, 1, _SOCK_STREAM),
            ALLOW,
            DENY,
        ],
        "sendto": [  # without an address: both halves of the pointer are zero
            argument(4),
            (EQUAL, 1, 0, 0),
            DENY,
            argument(4, high=True),
            (EQUAL, 0, 1, 0),
            ALLOW,
            DENY,
        ],
        "kill": signal,
        "tgkill": signal,
    }


def _none_of(index: int, values: Iterable[int]) -> list[Instruction]:
    tests = [step for value in values for step in ((EQUAL, 0, 1, value), DENY)]
    return [argument(index), *tests, ALLOW]


def _no_truncation(index: int) -> list[Instruction]:
    """No O_TRUNC on a file opened for reading: before its ABI 3 Landlock lets that empty it."""
    return [
        argument(index),
        (AND, 0, 0, _O_TRUNC | _O_ACCMODE),
        (EQUAL, 0, 1, _O_TRUNC),
        DENY,
        ALLOW,
    ]
