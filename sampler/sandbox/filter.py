"""The seccomp filter: a BPF program that lets through the calls of `sampler.sandbox.syscalls`.

Everything that is not named there fails with EPERM, or with ENOSYS where a C library has an older
call to fall back to. The kernel remembers which calls pass whatever their arguments, so that the
length of the program costs nothing.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable, Sequence
from functools import cache

from sampler.sandbox.syscalls import BY_ARGUMENT, CONTAINED, PLAIN

Instruction = tuple[int, int, int, int]
"""(code, jump if true, jump if false, constant); jumps count the instructions passed over."""

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> (column of the tables of `sampler.sandbox.syscalls`, AUDIT_ARCH constant)."""

LOAD, AND, EQUAL, GREATER, AT_LEAST, SET, RETURN = 0x20, 0x54, 0x15, 0x25, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
ALLOW: Instruction = (RETURN, 0, 0, 0x7FFF0000)
KILL: Instruction = (RETURN, 0, 0, 0x80000000)
DENY: Instruction = (RETURN, 0, 0, 0x00050000 | errno.EPERM)
ABSENT: Instruction = (RETURN, 0, 0, 0x00050000 | errno.ENOSYS)

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


def allow(numbers: Iterable[int | None]) -> list[Instruction]:
    """Lets calls through by their numbers, whatever the arguments; None is no call."""
    return [
        instruction
        for low, high in _ranges(numbers)
        for instruction in ((AT_LEAST, 0, 2, low), (GREATER, 1, 0, high), ALLOW)
    ]


def argument(index: int, *, high: bool = False) -> Instruction:
    """Loads a half of an argument (both architectures are little-endian)."""
    return (LOAD, 0, 0, _ARGUMENTS_AT + 8 * index + 4 * high)


def one_of(index: int, values: Iterable[int]) -> list[Instruction]:
    """Allows the call where an argument's lower half is one of the values, and else refuses it."""
    tests = [step for value in values for step in ((EQUAL, 0, 1, value), ALLOW)]
    return [argument(index), *tests, DENY]


def assemble(program: Sequence[Instruction], machine: str) -> bytes:
    """A filter as the kernel takes it: 8 bytes an instruction.

    Args:
        program: what to do once the number of the call is loaded.
        machine: as `uname -m` says.

    Raises:
        KeyError: no table for this architecture.
    """
    _, audit = ARCHITECTURES[machine]
    front = [(LOAD, 0, 0, _ARCH_AT), (EQUAL, 1, 0, audit), KILL, (LOAD, 0, 0, _NUMBER_AT)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in (*front, *program))


def _ranges(numbers: Iterable[int | None]) -> list[tuple[int, int]]:
    """Neighbouring numbers joined to (first, last)."""
    ranges: list[tuple[int, int]] = []
    for number in sorted({n for n in numbers if n is not None}):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges
