"""Launcher: one process for each isolated program, which supervises the program until its end.

It reads its order from a socket that the parent keeps open as long as the program may run. When the
socket closes, for whatever reason, the launcher ends the program. It answers first whether the
program started, or why not, and later how the program ended.

Its child is the init process: the first process of the PID namespace or, without one, the process
that adopts every orphan of the program. It collects the processes that end, and once the program
has ended it kills all the rest. It is trusted code out of the program's reach: the program can
neither trace nor signal it. Its child becomes the program.
"""

from __future__ import annotations

import errno
import os
import resource
import time

from . import control, kernel

TYPE_CHECKING = False
if TYPE_CHECKING:  # without the import of `typing`
    from collections.abc import Callable


def run_init(
    order: control.Order, user: int, tasks: int, ready: int, failures: int, report: int
) -> None:
    """Prepare the scratch directory, start the program, wait for it, report. Never returns.

    Args:
        order: what to start.
        user: id that the program gets outside of namespaces.
        tasks: limit on that user's processes and threads.
        ready: descriptor that receives a byte once the ids are mapped; its end means that the
            launcher has ended.
        failures: receives the reason if the program cannot be started; its start closes it.
        report: receives the message on how it ended.
    """
    try:
        if not os.read(ready, 1):
            os._exit(1)
        os.close(ready)
        os.umask(0o022)
        kernel.die_first()
        place = order.scratch
        contained = control.NAMESPACES in order.mechanisms
        if contained:
            kernel.build_root(order.readable, order.links, order.file_bytes)
            place = kernel.SCRATCH
        else:
            kernel.prctl("collecting orphans", kernel.PR_SET_CHILD_SUBREAPER, 1)
        kernel.prctl("not being traced", kernel.PR_SET_DUMPABLE, 0)
        _end_with_parent(kernel.SIGKILL if contained else kernel.SIGTERM)
        for name, content in order.files:
            path = os.path.join(place, name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "xb") as file:
                file.write(content)
        program = os.fork()
        if program == 0:
            _become(order, place, user, tasks, failures)
    except (OSError, ValueError) as error:
        os.write(failures, str(error).encode())
        os._exit(1)
    os.close(failures)
    detach_streams()
    _wait(program, report, b"" if contained else order.scratch)


def _end_with_parent(signal: int) -> None:
    """Have the kernel signal this process once its parent has ended."""
    parent = os.getppid()
    kernel.prctl("ending with the parent", kernel.PR_SET_PDEATHSIG, signal)
    if os.getppid() != parent:
        os._exit(1)


def _become(order: control.Order, place: bytes, user: int, tasks: int, failures: int) -> None:
    """Give up every right and become the program. Never returns."""
    try:
        os.setsid()
        contained = control.NAMESPACES in order.mechanisms
        kernel.forget_keys()
        if order.repeatable:
            kernel.fix_addresses()
        os.chdir(place)
        cpu = int(order.cpu_s) + 1 if order.cpu_s else 0
        kernel.set_limits(order.memory_bytes, order.file_bytes, cpu, tasks)
        kernel.give_up_rights(
            os.geteuid() if contained else user, read_all=order.read_all and not contained
        )
        _end_with_parent(kernel.SIGKILL)
        if control.LANDLOCK in order.mechanisms:
            kernel.restrict_files(order.readable, [place], kernel.DEVICES)
        if control.SECCOMP in order.mechanisms:
            kernel.install_filter(order.filter)
        environment = dict(order.environment)
        environment.update(dict.fromkeys((b"HOME", b"TMPDIR"), place))
        os.execve(order.command[0], order.command, environment)
    except OSError as error:
        where = os.fsdecode(order.command[0])
        text = str(error) if isinstance(error, kernel.CallFailed) else f"{where}: {error}"
        os.write(failures, text.encode())
    os._exit(1)


def detach_streams() -> None:
    """Close the program's pipes here, so that they end when the program ends."""
    silent = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for stream in (0, 1, 2):
        os.dup2(silent, stream, inheritable=False)


def _wait(program: int, report: int, directory: bytes) -> None:
    """Collect every process that ends until the program does.

    Then kill the others and remove `directory`. Without one, the kernel ends all of the namespace
    with this process.
    """
    if directory:
        import signal  # here, because its import takes milliseconds and namespaces do not need it

        def end(_number: int, _frame: object) -> None:
            _end_group(program)
            remove_scratch(directory)
            os._exit(0)

        signal.signal(signal.SIGTERM, end)
    control.answer(report, program=program)
    status, ended = 0, 0
    while ended != program:
        ended, status = os.wait()
    if directory:
        _end_group(program)
        remove_scratch(directory)
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = usage.ru_utime + usage.ru_stime
    control.answer(report, status=status, cpu_s=cpu_s, peak=usage.ru_maxrss << 10)
    os._exit(0)


def _end_group(program: int) -> None:
    """Kill the program's process group until nothing is left below the init process.

    A signal to a group also reaches processes that are being forked. A process can leave the group
    only if no filter applies.
    """
    try:
        while True:
            _kill(os.killpg, program)
            for pid in (program, *control.descendants(os.getpid())):
                _kill(os.kill, pid)
            os.wait()
    except ChildProcessError:
        return  # none left


def _kill(end: Callable[[int, int], None], pid: int) -> None:
    try:
        end(pid, kernel.SIGKILL)
    except ProcessLookupError:
        return


def remove_scratch(path: bytes) -> None:
    """Remove a scratch directory that a hostile program has filled; its writers are all dead.

    Any depth and any permissions; symbolic links are removed and never followed. Directories are
    moved up before they are emptied, so that no path grows with the depth. Whoever started the
    program may remove it at the same time.
    """
    while True:
        try:
            top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            return  # already removed
        try:
            _empty(top)
            os.rmdir(path)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY):
                raise  # else another removes it too: look again
        finally:
            os.close(top)


def _empty(top: int) -> None:
    moved, prefix = 0, os.urandom(8).hex()  # which names no file that is there
    while names := os.listdir(top):
        for name in names:
            if not _is_directory(name, top):
                os.unlink(name, dir_fd=top)
                continue
            os.chmod(name, 0o700, dir_fd=top)
            child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=top)
            try:
                for inner in os.listdir(child):
                    if not _is_directory(inner, child):
                        os.unlink(inner, dir_fd=child)
                        continue
                    os.chmod(inner, 0o700, dir_fd=child)  # moving a directory writes its `..`
                    moved += 1
                    target = f"{prefix}-{moved}"
                    os.rename(inner, target, src_dir_fd=child, dst_dir_fd=top)
            finally:
                os.close(child)
            os.rmdir(name, dir_fd=top)


def _is_directory(name: str, directory: int) -> bool:
    mode = os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode
    return mode & 0o170000 == 0o040000


_END_S = 10.0
"""Longest wait for the init process to end what is below it."""


def main(parent: int) -> None:
    """Run the order that comes over the descriptor `parent`; return once nothing is left."""
    os.set_inheritable(parent, False)
    order = control.read_order(parent)
    if order is None:
        return
    started = time.monotonic()
    ready, go = os.pipe()
    failures, failures_in = os.pipe()
    report, report_in = os.pipe()
    contained = control.NAMESPACES in order.mechanisms
    try:
        user = kernel.spare_user() if order.mechanisms else os.geteuid()
        tasks = kernel.tasks_allowed(order.processes, user, contained=contained)
        child = kernel.clone(kernel.FLAGS) if contained else os.fork()
    except OSError as error:
        control.answer(parent, failed=str(error))
        return
    if child == 0:
        for descriptor in (parent, go, failures, report):
            os.close(descriptor)
        run_init(order, user, tasks, ready, failures_in, report_in)
    for descriptor in (ready, failures_in, report_in):
        os.close(descriptor)
    problem = ""
    try:  # the child goes on once its ids are mapped
        if contained:
            kernel.map_ids(child, user, user if os.geteuid() == 0 else os.getegid())
        elif order.scratch and user != os.geteuid():
            os.chown(order.scratch, user, user)
        os.write(go, b"1")
    except OSError as error:
        problem = f"ids of a user namespace: {error}"
    os.close(go)
    if not problem:  # read until the program has started
        with open(failures, "rb") as file:
            problem = file.read().decode(errors="replace")
    if problem:
        _end(child, contained=contained)
        control.answer(parent, failed=problem)
        return
    first = control.read_answer(report)  # the program's process id
    control.answer(parent, started="yes")
    _supervise(order, parent, child, report, int(first.get("program", 0)), started)


def _supervise(
    order: control.Order, parent: int, child: int, report: int, program: int, started: float
) -> None:
    """Wait until the program ends, the parent closes the socket, or a limit is passed."""
    import select  # here, so that the program starts meanwhile

    detach_streams()
    watchdog = control.Watchdog(order, child, started)
    poll = select.poll()
    poll.register(parent, select.POLLIN | select.POLLHUP)
    poll.register(report, select.POLLIN | select.POLLHUP)
    verdict = ""
    while not verdict:
        events = dict(poll.poll(watchdog.wait_ms()))
        if report in events:
            break
        verdict = "killed" if parent in events else watchdog.check()
    ending = {} if verdict else control.read_answer(report)
    _end(child, contained=control.NAMESPACES in order.mechanisms, program=program)
    wall = time.monotonic() - started
    try:
        seen = {"wall_s": wall, "seen": watchdog.peak, "cpu_seen": watchdog.cpu}
        control.answer(parent, verdict=verdict, **seen, **ending)
    except OSError:
        return  # the parent has closed its end


def _end(child: int, *, contained: bool, program: int = 0) -> None:
    """End the init process and all below it, and wait for that."""
    try:
        os.kill(child, kernel.SIGKILL if contained else kernel.SIGTERM)
        end = time.monotonic() + _END_S
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                below = control.descendants(child)  # before they get another parent
                if program and not contained:
                    _kill(os.killpg, program)
                for pid in (child, *below):
                    _kill(os.kill, pid)
                end = time.monotonic() + _END_S
            time.sleep(0.001)
    except (ProcessLookupError, ChildProcessError):
        return
