"""System calls by name and number, on the two architectures that a filter can be built for.

From the kernel's own headers (`asm/unistd_64.h` of x86, `asm-generic/unistd.h` for aarch64). What
is in none of the tables a filter refuses.
"""

from __future__ import annotations


def _table(text: str) -> dict[str, tuple[int | None, int | None]]:
    """`name:x86_64:aarch64` words as {name: (x86_64, aarch64)}; `-` where there is none."""
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
"""Allowed whatever the arguments: they reach only the process itself, its descriptors and files
that Landlock or the mounts let it open."""

CONTAINED = _table("""
    chmod:90:- fchmod:91:52 fchmodat:268:53 fchmodat2:452:452 utimensat:280:88 utimes:235:-
    utime:132:- futimesat:261:- truncate:76:45 setsid:112:157 setpgid:109:154
""")
"""Allowed where namespaces hold: without them they change the mode or the times of files that the
user owns anywhere (Landlock does not speak of those), or leave the process group."""

BY_ARGUMENT = _table("""
    open:2:- openat:257:56 creat:85:- clone:56:220 fcntl:72:25 ioctl:16:29 prctl:157:167
    prlimit64:302:261 socketpair:53:199 sendto:44:206 kill:62:129 tgkill:234:131 clone3:435:435
    openat2:437:437
""")
"""Allowed by some for some arguments: their filters say which."""
