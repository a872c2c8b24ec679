"""What the decoder's process gives up before it sees a stranger's byte: files, memory, calls.

It has read all the code that it needs. From then on it reads what it is sent and writes what it
answers: no file is opened or grows, no process and no thread is started, nothing is sent to
anybody. On Linux a seccomp filter lets through the calls that Python, numpy and Arrow need for that
and refuses all others; elsewhere the limits of `resource` have to do.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys

from runspec.core.seccomp import ARCHITECTURES, DENY, EQUAL, allow, assemble, one_of
from runspec.core.syscalls import BY_ARGUMENT, PLAIN

_PAGE = resource.getpagesize()
_ALLOWED = (
    *("read", "readv", "write", "pread64", "close", "lseek", "fstat"),
    *("mmap", "mprotect", "munmap", "mremap", "madvise", "brk"),
    *("futex", "rt_sigreturn", "rt_sigprocmask", "sigaltstack", "sched_yield"),
    *("clock_gettime", "setitimer", "getrandom", "getpid", "gettid", "exit", "exit_group"),
)
"""Calls that pass whatever their arguments."""
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SIGKILL, _MODE_FILTER = 9, 2


class Limits:
    """Processor time and memory of this process, set anew for each file."""

    def __init__(self) -> None:
        self._size = os.open("/proc/self/statm", os.O_RDONLY) if sys.platform == "linux" else None

    def allow(self, *, cpu_s: int, memory: int) -> None:
        """Lets the process use so much more than it has used: seconds and bytes.

        The first is ended by SIGPROF; the second is an allocation that fails. No RLIMIT_CPU: Linux
        counts that in whole ticks, what a process can ask for precisely, and on a busy machine the
        two are seconds apart after a minute.
        """
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        if self._size is not None:
            pages = int(os.pread(self._size, 64, 0).split()[0])
            _lower(resource.RLIMIT_AS, pages * _PAGE + memory)


def set_signals() -> None:
    """Whoever ends all of a group (Ctrl-C, a service that is stopped) means the parent, which ends
    this process as it ends. The timer of `Limits` is heard whatever was ignored where it started.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF})


def confine() -> None:
    """Gives up everything else; there is no way back."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))  # those that are open stay
    if hasattr(resource, "RLIMIT_NPROC"):
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    if sys.platform == "linux" and os.uname().machine in ARCHITECTURES:
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
    """Puts on the filter: the calls of the table, and `prlimit64` on the process itself."""
    column, _ = ARCHITECTURES[machine]
    own_limits, number = one_of(0, (0,)), BY_ARGUMENT["prlimit64"][column]
    assert number is not None
    program = [
        (EQUAL, 0, len(own_limits), number),
        *own_limits,
        *allow(PLAIN[name][column] for name in _ALLOWED),
        DENY,
    ]
    code = assemble(program, machine)
    buffer = ctypes.create_string_buffer(code, len(code))
    header = ctypes.create_string_buffer(
        struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)), struct.calcsize("@HP")
    )
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    _prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.addressof(header))


def _prctl(option: int, first: int, second: int = 0) -> None:
    call = ctypes.CDLL(None, use_errno=True).prctl
    arguments = [ctypes.c_ulong(value) for value in (first, second, 0, 0)]
    if call(option, *arguments) != 0:
        raise OSError(ctypes.get_errno(), f"prctl {option}")
