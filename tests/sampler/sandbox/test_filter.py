"""The seccomp filter, run instruction by instruction for either architecture."""

from __future__ import annotations

import errno
import itertools
import os
import struct
from pathlib import Path

import pytest

from sampler.sandbox.filter import ALLOW, ARCHITECTURES, BY_ARGUMENT, CONTAINED, KILL, PLAIN, build

EPERM, ENOSYS = 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
TABLES = {**PLAIN, **CONTAINED, **BY_ARGUMENT}


def verdict(program: bytes, audit: int, number: int, *arguments: int) -> int:
    """What the kernel would do: a BPF machine with the instructions that the filter uses."""
    values = [argument & (1 << 64) - 1 for argument in (*arguments, 0, 0, 0, 0, 0, 0)][:6]
    data = struct.pack("=IIQ6Q", number, audit, 0, *values)
    steps = list(struct.iter_unpack("=HBBI", program))
    at = accumulator = 0
    while True:
        code, yes, no, constant = steps[at]
        at += 1
        if code == 0x06:
            return constant
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, constant)
        elif code == 0x54:
            accumulator &= constant
        else:
            tests = {
                0x15: accumulator == constant,
                0x25: accumulator > constant,
                0x35: accumulator >= constant,
                0x45: bool(accumulator & constant),
            }
            at += yes if tests[code] else no


@pytest.fixture(params=list(ARCHITECTURES))
def machine(request):
    return request.param


def ask(machine: str, name: str, *arguments: int, contained: bool = False) -> int | None:
    """The verdict on a call by its name; None where the architecture has no such call."""
    column, audit = ARCHITECTURES[machine]
    number = TABLES[name][column]
    program = build(contained=contained, signals_scoped=True, machine=machine)
    return None if number is None else verdict(program, audit, number, *arguments)


def test_plain_calls_pass(machine):
    assert {ask(machine, name) for name in PLAIN} <= {ALLOW[3], None}


def test_every_other_number_is_refused(machine):
    column, audit = ARCHITECTURES[machine]
    program = build(contained=False, signals_scoped=True, machine=machine)
    known = {row[column] for row in (*PLAIN.values(), *BY_ARGUMENT.values())}
    refused = [verdict(program, audit, n) for n in range(500) if n not in known]
    assert set(refused) == {EPERM, ENOSYS}
    assert verdict(program, audit, 0x40000000) == ENOSYS  # x32's numbers


def test_another_architecture_s_call_ends_the_process(machine):
    program = build(contained=False, signals_scoped=True, machine=machine)
    assert verdict(program, 0x40000003, 0) == KILL[3]


def test_leaving_the_group_and_changing_modes_pass_in_namespaces_alone(machine):
    for name in CONTAINED:
        assert ask(machine, name, contained=True) in (ALLOW[3], None)
        assert ask(machine, name, contained=False) in (EPERM, None)


@pytest.mark.parametrize(
    ("name", "arguments", "wanted"),
    [
        ("clone", (17,), ALLOW[3]),
        ("clone", (0x3D0F00,), ALLOW[3]),  # a thread
        ("clone", (0x10000000,), EPERM),
        ("clone", (0x8000,), EPERM),
        ("clone3", (), ENOSYS),
        ("openat2", (), ENOSYS),
        ("openat", (0, 0, os.O_RDONLY), ALLOW[3]),
        ("openat", (0, 0, os.O_WRONLY | os.O_TRUNC | os.O_CREAT), ALLOW[3]),
        ("openat", (0, 0, os.O_RDONLY | os.O_TRUNC), EPERM),
        ("socketpair", (1, 1 | 0o2000000), ALLOW[3]),
        ("socketpair", (1, 2), EPERM),
        ("socketpair", (2, 1), EPERM),
        ("sendto", (0, 0, 0, 0, 0), ALLOW[3]),
        ("sendto", (0, 0, 0, 0, 0x1000), EPERM),
        ("sendto", (0, 0, 0, 0, 1 << 40), EPERM),
        ("prlimit64", (0,), ALLOW[3]),
        ("prlimit64", (77,), EPERM),
        ("prctl", (15,), ALLOW[3]),
        ("prctl", (1,), EPERM),
        ("fcntl", (0, 3), ALLOW[3]),
        ("fcntl", (0, 8), EPERM),
        ("ioctl", (0, 0x5401), ALLOW[3]),
        ("ioctl", (0, 0x5412), EPERM),
        ("kill", (77,), ALLOW[3]),
    ],
)
def test_calls_are_judged_by_their_arguments(machine, name, arguments, wanted):
    assert ask(machine, name, *arguments) == wanted


def test_where_nothing_scopes_signals_only_the_own_group_gets_any(machine):
    column, audit = ARCHITECTURES[machine]
    number = BY_ARGUMENT["kill"][column]
    assert number is not None
    program = build(contained=False, signals_scoped=False, machine=machine)
    assert verdict(program, audit, number, 0) == ALLOW[3]
    assert verdict(program, audit, number, 77) == EPERM
    assert verdict(program, audit, number, -1) == EPERM


def test_no_number_stands_twice(machine):
    column, _ = ARCHITECTURES[machine]
    numbers = [row[column] for row in TABLES.values() if row[column] is not None]
    assert len(numbers) == len(set(numbers))


def test_the_numbers_are_the_kernel_headers():
    header = Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h")
    if not header.exists():
        pytest.skip("no kernel headers here")
    rows = (line.split() for line in header.read_text().splitlines())
    known = {row[1]: int(row[2]) for row in rows if len(row) == 3 and row[1].startswith("__NR_")}
    ours = {f"__NR_{name}": row[0] for name, row in TABLES.items() if row[0] is not None}
    assert {n: ours[n] for n in ours if n in known} == {n: known[n] for n in ours if n in known}
    assert len([n for n in itertools.chain(ours) if n in known]) > 150
