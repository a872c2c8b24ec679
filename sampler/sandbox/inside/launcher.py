"""Launcher: one process for each isolated program, which supervises the program until its end.

It reads its order from a socket that the parent keeps open as long as the program may run. When the
socket closes, for whatever reason, the launcher ends the program. It answers first whether the
program started, or why not, and later how the program ended.
"""

from __future__ import annotations

import os
import time

from . import init_process, kernel, limits, messages, namespaces
from .messages import NAMESPACES, Order, unpack
from .watchdog import Watchdog

_END_S = 10.0
"""Longest wait for the init process to end what is below it."""


def main(control: int) -> None:
    """Run the order that comes over the descriptor `control`; return once nothing is left."""
    os.set_inheritable(control, False)
    fields = messages.read_order(control)
    if not fields:
        return
    order = unpack(fields)
    started = time.monotonic()
    ready, go = os.pipe()
    failures, failures_in = os.pipe()
    report, report_in = os.pipe()
    contained = NAMESPACES in order.mechanisms
    try:
        user = limits.spare_user() if order.mechanisms else os.geteuid()
        tasks = limits.tasks_allowed(order.processes, user, contained=contained)
        child = kernel.clone(namespaces.FLAGS) if contained else os.fork()
    except OSError as error:
        messages.answer(control, failed=str(error))
        return
    if child == 0:
        for descriptor in (control, go, failures, report):
            os.close(descriptor)
        init_process.run_init(order, user, tasks, ready, failures_in, report_in)
    for descriptor in (ready, failures_in, report_in):
        os.close(descriptor)
    problem = _let_go(order, child, user, go)
    problem = problem or _text(failures)
    if problem:
        _end(child, contained=contained)
        messages.answer(control, failed=problem)
        return
    first = messages.read_answer(report)  # the program's process id
    messages.answer(control, started="yes")
    _supervise(order, control, child, report, int(first.get("program", 0)), started)


def _let_go(order: Order, child: int, user: int, go: int) -> str:
    """Map the child's ids and let it continue; return what went wrong, or nothing."""
    try:
        if NAMESPACES in order.mechanisms:
            namespaces.map_ids(child, user, user if os.geteuid() == 0 else os.getegid())
        elif order.scratch and user != os.geteuid():
            os.chown(order.scratch, user, user)
        os.write(go, b"1")
    except OSError as error:
        return f"ids of a user namespace: {error}"
    finally:
        os.close(go)
    return ""


def _text(descriptor: int) -> str:
    """Read until the descriptor's other ends are closed."""
    text = b""
    while part := os.read(descriptor, 4096):
        text += part
    os.close(descriptor)
    return text.decode(errors="replace")


def _supervise(
    order: Order, control: int, child: int, report: int, program: int, started: float
) -> None:
    """Wait until the program ends, the parent closes the socket, or a limit is passed."""
    import select  # here, so that the program starts meanwhile

    init_process.detach_streams()
    watchdog = Watchdog(order, child, started)
    poll = select.poll()
    poll.register(control, select.POLLIN | select.POLLHUP)
    poll.register(report, select.POLLIN | select.POLLHUP)
    verdict = ""
    while not verdict:
        events = dict(poll.poll(watchdog.wait_ms()))
        if report in events:
            break
        verdict = "killed" if control in events else watchdog.check()
    ending = {} if verdict else messages.read_answer(report)
    _end(child, contained=NAMESPACES in order.mechanisms, program=program)
    wall = time.monotonic() - started
    try:
        seen = {"wall_s": wall, "seen": watchdog.peak, "cpu_seen": watchdog.cpu}
        messages.answer(control, verdict=verdict, **seen, **ending)
    except OSError:
        return  # the parent has closed its end


def _end(child: int, *, contained: bool, program: int = 0) -> None:
    """End the init process and all below it, and wait for that."""
    try:
        os.kill(child, kernel.SIGKILL if contained else kernel.SIGTERM)
        end = time.monotonic() + _END_S
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(child, kernel.SIGKILL)
                if program and not contained:
                    os.killpg(program, kernel.SIGKILL)
                end = time.monotonic() + _END_S
            time.sleep(0.001)
    except (ProcessLookupError, ChildProcessError):
        return
