"""Seccomp filters: BPF programs that say which system calls a process may make.

A program is a list of instructions that ends every way in a verdict. `assemble` puts in front what
every filter needs: another architecture's calls, whose numbers mean something else, end the
process, and the number of the call is what the first instruction finds loaded.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Iterable, Sequence

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
