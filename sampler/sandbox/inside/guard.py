"""The two processes around the isolated program: a guard, and what becomes the program itself.

The guard is the first process of the PID namespace, or, without one, the process to which every
orphan of the program falls: it collects what ends, and once the program has ended it ends all the
rest. Trusted code, out of the program's reach: not traceable, not to be signalled.
"""

from __future__ import annotations

import os
import resource

from . import kernel, landlock, limits, namespaces, scratch, wire
from .order import LANDLOCK, NAMESPACES, SECCOMP, Order
from .watch import descendants

TYPE_CHECKING = False
if TYPE_CHECKING:  # as `typing` says it, without its import
    from collections.abc import Callable


def guard(order: Order, user: int, tasks: int, ready: int, failures: int, report: int) -> None:
    """Prepares the scratch directory, starts the program, waits for it, reports. Never returns.

    Args:
        order: what to start.
        user: whose id the program gets outside of namespaces.
        tasks: limit on that user's processes and threads.
        ready: descriptor on which a byte says that the ids are mapped; its end that nobody is
            there any more.
        failures: takes the reason where the program could not be started; closed by its start.
        report: takes the message on how it ended.
    """
    try:
        if not os.read(ready, 1):
            os._exit(1)
        os.close(ready)
        os.umask(0o022)
        limits.die_first()
        place = order.scratch
        contained = order.isolates(NAMESPACES)
        if contained:
            namespaces.build(order.readable, order.links, order.file_bytes)
            place = namespaces.SCRATCH
        else:
            kernel.prctl("collecting orphans", kernel.PR_SET_CHILD_SUBREAPER, 1)
        kernel.prctl("not being traced", kernel.PR_SET_DUMPABLE, 0)
        _end_with_parent(kernel.SIGKILL if contained else kernel.SIGTERM)
        _write_files(place, order.files)
        program = os.fork()
        if program == 0:
            _become(order, place, user, tasks, failures)
    except (OSError, ValueError) as error:
        os.write(failures, str(error).encode())
        os._exit(1)
    os.close(failures)
    _detach_streams()
    _wait(program, report, b"" if contained else order.scratch)


def _end_with_parent(signal: int) -> None:
    """The kernel signals this process once its parent has ended."""
    parent = os.getppid()
    kernel.prctl("ending with the parent", kernel.PR_SET_PDEATHSIG, signal)
    if os.getppid() != parent:
        os._exit(1)


def _write_files(place: bytes, files: list[tuple[bytes, bytes]]) -> None:
    for name, content in files:
        path = os.path.join(place, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            file.write(content)


def _become(order: Order, place: bytes, user: int, tasks: int, failures: int) -> None:
    """Lays down every right and becomes the program. Never returns."""
    try:
        os.setsid()
        contained = order.isolates(NAMESPACES)
        kernel.forget_keys()
        os.chdir(place)
        cpu = int(order.cpu_s) + 1 if order.cpu_s else 0
        limits.apply(order.memory, order.file_bytes, cpu, tasks)
        limits.give_up_rights(
            os.geteuid() if contained else user, read_all=order.read_all and not contained
        )
        _end_with_parent(kernel.SIGKILL)
        if order.isolates(LANDLOCK):
            landlock.restrict(order.readable, [place], namespaces.DEVICES)
        if order.isolates(SECCOMP):
            kernel.install_filter(order.filter)
        environment = dict(order.environment)
        environment.update(dict.fromkeys((b"HOME", b"TMPDIR"), place))
        os.execve(order.command[0], order.command, environment)
    except OSError as error:
        where = os.fsdecode(order.command[0])
        text = str(error) if isinstance(error, kernel.CallFailed) else f"{where}: {error}"
        os.write(failures, text.encode())
    os._exit(1)


def _detach_streams() -> None:
    """Lets go of the program's pipes, so that their ends mean its end."""
    silent = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for stream in (0, 1, 2):
        os.dup2(silent, stream, inheritable=False)


def _wait(program: int, report: int, directory: bytes) -> None:
    """Collects every process that ends until the program does; then ends the others, and takes
    `directory` away (without one, the kernel ends all of the namespace with this process)."""
    if directory:
        _end_on_signal(program, directory)
    wire.answer(report, program=program)
    status, ended = 0, 0
    while ended != program:
        ended, status = os.wait()
    if directory:
        _end_group(program)
        scratch.remove(directory)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = usage.ru_utime + usage.ru_stime
    wire.answer(report, status=status, cpu_s=cpu_s, peak=usage.ru_maxrss << 10)
    os._exit(0)


def _end_on_signal(program: int, directory: bytes) -> None:
    import signal  # only here: it costs milliseconds, and namespaces do without

    def end(_number: int, _frame: object) -> None:
        _end_group(program)
        scratch.remove(directory)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)


def _end_group(program: int) -> None:
    """Kills the program's process group until nothing is left below the guard. A signal to a group
    reaches also what is being forked meanwhile; only where no filter holds can a process leave the
    group."""
    try:
        while True:
            _kill(os.killpg, program)
            for pid in (program, *descendants(os.getpid())):
                _kill(os.kill, pid)
            os.wait()
    except ChildProcessError:
        return  # none left


def _kill(end: Callable[[int, int], None], pid: int) -> None:
    try:
        end(pid, kernel.SIGKILL)
    except ProcessLookupError:
        return
