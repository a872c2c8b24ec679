"""The seccomp filter: a BPF program that allows the system calls of the tables here.

Every other call fails with EPERM, or with ENOSYS where a C library has an older call to fall back
to. The kernel remembers which calls pass whatever their arguments, so the length of the program
costs nothing. The numbers are from the kernel's own headers (`asm/unistd_64.h` of x86,
`asm-generic/unistd.h` for aarch64), the two architectures that a filter can be built for.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable
from functools import cache


def _table(text: str) -> dict[str, tuple[int | None, int | None]]:
    """Parse `name:x86_64:aarch64` words to {name: (x86_64, aarch64)}; `-` means none."""
    rows = (word.split(":") for word in text.split())
    return {
        name: (None if x86 == "-" else int(x86), None if arm == "-" else int(arm))
        for name, x86, arm in rows
    }


PLAIN = _table("""
    read:0:63 write:1:64 pread64:17:67 pwrite64:18:68 readv:19:65 writev:20:66 preadv:295:69
    pwritev:296:70 preadv2:327:286 pwritev2:328:287 close:3:57 close_range:436:436 lseek:8:62
    fstat:5:80 newfstatat:262:79 stat:4:- lstat:6:- statx:332:291 access:21:- faccessat:269:48
    faccessat2:439:439 readlink:89:- readlinkat:267:78 getdents:78:- getdents64:217:61
    getcwd:79:17 chdir:80:49 fchdir:81:50 dup:32:23 dup2:33:- dup3:292:24 pipe:22:- pipe2:293:59
    poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20
    epoll_ctl:233:21 epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441 eventfd:284:-
    eventfd2:290:19 timerfd_create:283:85 timerfd_settime:286:86 timerfd_gettime:287:87
    fsync:74:82 fdatasync:75:83 ftruncate:77:46 fallocate:285:47 fadvise64:221:223 sendfile:40:71
    splice:275:76 tee:276:77 copy_file_range:326:285 flock:73:32 mkdir:83:- mkdirat:258:34
    rmdir:84:- unlink:87:- unlinkat:263:35 rename:82:- renameat:264:38 renameat2:316:276 link:86:-
    linkat:265:37 symlink:88:- symlinkat:266:36 umask:95:166 statfs:137:43 fstatfs:138:44
    mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216 madvise:28:233 brk:12:214
    mincore:27:232 msync:26:227 membarrier:324:283 execve:59:221 exit:60:93 exit_group:231:94
    wait4:61:260 waitid:247:95 fork:57:- vfork:58:- getpid:39:172 getppid:110:173 gettid:186:178
    getpgid:121:155 getpgrp:111:- getsid:124:156 getuid:102:174 geteuid:107:175 getgid:104:176
    getegid:108:177 getgroups:115:158 getresuid:118:148 getresgid:120:150 set_tid_address:218:96
    set_robust_list:273:99 get_robust_list:274:100 rseq:334:293 futex:202:98 sched_yield:24:124
    sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120
    sched_get_priority_max:146:125 sched_get_priority_min:147:126 getrusage:98:165 times:100:153
    getrlimit:97:163 setrlimit:160:164 arch_prctl:158:- uname:63:160 sysinfo:99:179
    getrandom:318:278 getcpu:309:168 rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139
    rt_sigpending:127:136 rt_sigsuspend:130:133 rt_sigtimedwait:128:137 sigaltstack:131:132
    pause:34:- alarm:37:- getitimer:36:102 setitimer:38:103 restart_syscall:219:128
    nanosleep:35:101 clock_nanosleep:230:115 clock_gettime:228:113 clock_getres:229:114
    gettimeofday:96:169 time:201:- recvfrom:45:207 recvmsg:47:212 shutdown:48:210
    getsockname:51:204 getpeername:52:205 getsockopt:55:209 setsockopt:54:208
""")
"""Allowed whatever the arguments: they affect only the process itself, its descriptors and files
that Landlock or the mounts let it open."""

CONTAINED = _table("""
    chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 utimensat:280:88 utimes:235:-
    utime:132:- futimesat:261:- truncate:76:45 setsid:112:157 setpgid:109:154
""")
"""Allowed if namespaces apply. Without them these calls change the mode or the times of any file of
the user, which Landlock does not prevent, or leave the process group."""

BY_ARGUMENT = _table("""
    open:2:- openat:257:56 creat:85:- clone:56:220 fcntl:72:25 ioctl:16:29 prctl:157:167
    prlimit64:302:261 socketpair:53:199 sendto:44:206 kill:62:129 tgkill:234:131 clone3:435:435
    openat2:437:437
""")
"""Allowed for some arguments only, see `_by_argument`."""


Instruction = tuple[int, int, int, int]
"""(code, jump if true, jump if false, constant); jumps count the instructions passed over."""

ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Machine -> (column of the tables of `sampler.sandbox.filter`, AUDIT_ARCH constant)."""

LOAD, AND, EQUAL, GREATER, AT_LEAST, SET, RETURN = 0x20, 0x54, 0x15, 0x25, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _ARGUMENTS_AT = 0, 4, 16
ALLOW: Instruction = (RETURN, 0, 0, 0x7FFF0000)
KILL: Instruction = (RETURN, 0, 0, 0x80000000)
DENY: Instruction = (RETURN, 0, 0, 0x00050000 | errno.EPERM)
ABSENT: Instruction = (RETURN, 0, 0, 0x00050000 | errno.ENOSYS)

NEWEST = 462
"""Newest call when the tables were written. Calls above this number get ENOSYS."""
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
    """Return the filter as the kernel reads it: 8 bytes an instruction.

    Args:
        contained: PID, mount and IPC namespaces apply as well.
        signals_scoped: Landlock keeps signals inside (ABI 6). If neither it nor a PID namespace
            does, a process may signal only its own group as a whole.
        machine: as `uname -m` prints it; empty for this machine.

    Raises:
        KeyError: no table for this architecture.
    """
    machine = machine or os.uname().machine
    column, audit = ARCHITECTURES[machine]
    program: list[Instruction] = [
        (LOAD, 0, 0, _ARCH_AT),
        (EQUAL, 1, 0, audit),
        KILL,
        (LOAD, 0, 0, _NUMBER_AT),
    ]
    for name, body in _by_argument(free_signals=contained or signals_scoped).items():
        number = BY_ARGUMENT[name][column]
        if number is not None:
            program += [(EQUAL, 0, len(body), number), *body]
    rows = [*PLAIN.values(), *(CONTAINED.values() if contained else ())]
    for low, high in _ranges(row[column] for row in rows):
        program += [(AT_LEAST, 0, 2, low), (GREATER, 1, 0, high), ALLOW]
    program += [(GREATER, 0, 1, NEWEST), ABSENT, DENY]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _by_argument(*, free_signals: bool) -> dict[str, list[Instruction]]:
    """Return the instructions that follow once a call's number has matched; each list ends with a
    verdict."""
    signal = [ALLOW] if free_signals else _by_value(0, (0,), ALLOW, DENY)
    return {
        "clone3": [ABSENT],  # its flags are in memory, which a filter cannot read
        "openat2": [ABSENT],
        "clone": [_argument(0), (SET, 0, 1, _CLONE_REFUSED), DENY, ALLOW],
        "open": _no_truncation(1),
        "openat": _no_truncation(2),
        "creat": [ALLOW],
        "fcntl": _by_value(1, _FCNTL_REFUSED, DENY, ALLOW),
        "ioctl": _by_value(1, _IOCTL_REFUSED, DENY, ALLOW),
        "prctl": _by_value(0, _PRCTL_ALLOWED, ALLOW, DENY),
        "prlimit64": _by_value(0, (0,), ALLOW, DENY),  # only the caller's own limits
        # A pair of streams is connected to itself; a pair of datagram sockets can send elsewhere.
        "socketpair": [
            _argument(0),
            (EQUAL, 1, 0, _AF_UNIX),
            DENY,
            _argument(1),
            (AND, 0, 0, _SOCK_TYPE),
            (EQUAL, 0, 1, _SOCK_STREAM),
            ALLOW,
            DENY,
        ],
        "sendto": [  # without an address: both halves of the pointer are zero
            _argument(4),
            (EQUAL, 1, 0, 0),
            DENY,
            _argument(4, high=True),
            (EQUAL, 0, 1, 0),
            ALLOW,
            DENY,
        ],
        "kill": signal,
        "tgkill": signal,
    }


def _no_truncation(index: int) -> list[Instruction]:
    """Refuse O_TRUNC on a file opened for reading, which Landlock before ABI 3 lets empty the
    file."""
    return [
        _argument(index),
        (AND, 0, 0, _O_TRUNC | _O_ACCMODE),
        (EQUAL, 0, 1, _O_TRUNC),
        DENY,
        ALLOW,
    ]


def _argument(index: int, *, high: bool = False) -> Instruction:
    """Return an instruction that loads a half of an argument (both architectures are
    little-endian)."""
    return (LOAD, 0, 0, _ARGUMENTS_AT + 8 * index + 4 * high)


def _by_value(
    index: int, values: Iterable[int], verdict: Instruction, otherwise: Instruction
) -> list[Instruction]:
    """Return `verdict` if an argument's lower half is one of the values, else `otherwise`."""
    tests = [step for value in values for step in ((EQUAL, 0, 1, value), verdict)]
    return [_argument(index), *tests, otherwise]


def _ranges(numbers: Iterable[int | None]) -> list[tuple[int, int]]:
    """Join neighbouring numbers to (first, last)."""
    ranges: list[tuple[int, int]] = []
    for number in sorted({n for n in numbers if n is not None}):
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return ranges
