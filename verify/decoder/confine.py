"""What the decoder's process gives up before it sees a stranger's byte: files, memory, calls.

It has read all the code that it needs. From then on it reads what it is sent and writes what it
answers: no file is opened or grows, no process and no thread is started, nothing is sent to
anybody. On Linux a seccomp filter lets through the calls that Python, numpy and Arrow need for that
and refuses all others; elsewhere the limits of `resource` have to do.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import struct
import sys

_PAGE = resource.getpagesize()
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_COLUMN = {"x86_64": 0, "aarch64": 1}
_ALLOWED = {
    "read": (0, 63),
    "readv": (19, 65),
    "write": (1, 64),
    "pread64": (17, 67),
    "close": (3, 57),
    "lseek": (8, 62),
    "fstat": (5, 80),
    "mmap": (9, 222),
    "mprotect": (10, 226),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "brk": (12, 214),
    "futex": (202, 98),
    "rt_sigreturn": (15, 139),
    "rt_sigprocmask": (14, 135),
    "sigaltstack": (131, 132),
    "sched_yield": (24, 124),
    "clock_gettime": (228, 113),
    "getrusage": (98, 165),
    "getrandom": (318, 278),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
"""Call -> its number on x86_64, on aarch64."""
_PRLIMIT64 = (302, 261)
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_NUMBER_AT, _ARCH_AT, _PID_AT = 0, 4, 16
_ALLOW, _KILL, _DENY = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SIGKILL, _MODE_FILTER = 9, 2


class Limits:
    """Processor time and memory of this process, set anew for each file."""

    def __init__(self) -> None:
        self._size = os.open("/proc/self/statm", os.O_RDONLY) if sys.platform == "linux" else None

    def allow(self, *, cpu_s: int, memory: int) -> None:
        """Lets the process use so much more than it has used: seconds and bytes.

        The first is ended by SIGXCPU; the second is an allocation that fails.
        """
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = int(usage.ru_utime + usage.ru_stime) + 1
        _lower(resource.RLIMIT_CPU, used + cpu_s)
        if self._size is not None:
            pages = int(os.pread(self._size, 64, 0).split()[0])
            _lower(resource.RLIMIT_AS, pages * _PAGE + memory)


def confine() -> None:
    """Gives up everything else; there is no way back."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # those that are open stay
    if hasattr(resource, "RLIMIT_NPROC"):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if sys.platform == "linux" and os.uname().machine in _COLUMN:
        _filter_calls(os.uname().machine)


def die_with_parent() -> None:
    """On Linux: killed when the thread that started it ends. Elsewhere its input ends then."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, _SIGKILL)
        _prctl(_PR_SET_DUMPABLE, 0)


def _lower(kind: int, soft: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (soft if hard == resource.RLIM_INFINITY else min(soft, hard), hard))


def _filter_calls(machine: str) -> None:
    """A BPF program: the calls of the table, and `prlimit64` on the process itself."""
    column = _COLUMN[machine]
    program = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    for numbers in _ALLOWED.values():
        program += [(_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ALLOW)]
    program += [
        (_EQUAL, 0, 3, _PRLIMIT64[column]),
        (_LOAD, 0, 0, _PID_AT),
        (_EQUAL, 0, 1, 0),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
    ]
    code = b"".join(struct.pack("=HBBI", *instruction) for instruction in program)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(
        struct.pack("@HP", len(program), ctypes.addressof(buffer)), struct.calcsize("@HP")
    )
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(header))


def _prctl(option: int, first: int, second: int = 0) -> None:
    call = ctypes.CDLL(None, use_errno=True).prctl
    arguments = [ctypes.c_ulong(value) for value in (first, second, 0, 0)]
    if call(option, *arguments) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")
