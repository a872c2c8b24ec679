"""Programs that take all they can get: each limit, and the machine afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from sampler.sandbox import run
from sampler.sandbox.inside.limits import spare_user
from sampler.sandbox.limits import Finished
from tests.attacks.sandboxed import LIMITS, PRELUDE, Sandbox
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


SLEEPERS = """
import threading
def fork():
    if os.fork() == 0:
        time.sleep(300)
        os._exit(0)
def thread(): threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
made = 0
try:
    while made < 100:
        {kind}()
        made += 1
    time.sleep(300)
finally:
    print(made, flush=True)
"""


@pytest.mark.parametrize("kind", ["fork", "thread"])
def test_a_bomb_of_processes_stops_at_the_limit(sandbox: Sandbox, kind: str) -> None:
    finished = sandbox.run(SLEEPERS.replace("{kind}", kind))
    assert finished.outcome == "processes", finished
    assert stopped_by_kernel(sandbox, finished)


def stopped_by_kernel(sandbox: Sandbox, finished: Finished) -> bool:
    """Whether exactly the next process failed; outside of namespaces, and without a user of the
    program's own, all of the user's processes are counted together, and the supervisor ends who
    has too many."""
    if not sandbox.contained and spare_user() == os.geteuid():
        return finished.stdout != b"100\n"
    return int(finished.stdout) == LIMITS.processes - 1


CHILDREN = """
import mmap
for _ in range(6):
    if os.fork() == 0:
        x = {memory}
        for i in range(0, len(x), 4096): x[i] = 1
        time.sleep(300)
time.sleep(300)
"""
LOOPS_IN_CHILDREN = """
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        end = time.process_time() + 0.1
        while time.process_time() < end: pass
        os._exit(0)
    os.wait()
"""
SLEEP = """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(300)
"""
FILES = """
held = []
os.mkdir("blind", 0o300)
for i in range(200):
    held.append(open({name}, 'wb', buffering=0))
    {then}
    held[-1].write(bytes(1 << 20))
    time.sleep(0.01)
"""
FORKS = """
while True:
    try: os.fork()
    except OSError: pass
"""
LIMITED: dict[str, tuple[str, dict[str, float | None], str]] = {
    "forks without end": (FORKS, {"wall_s": 1.0, "cpu_s": None}, "time processes"),
    "one allocation": ("x = bytearray(1 << 30)", {}, "memory"),
    "private memory": (CHILDREN.replace("{memory}", "bytearray(120 << 20)"), {}, "memory"),
    "shared memory": (CHILDREN.replace("{memory}", "mmap.mmap(-1, 120 << 20)"), {}, "memory"),
    "an endless loop": ("while True: pass", {"cpu_s": 0.5}, "cpu"),
    "loops in children": (LOOPS_IN_CHILDREN, {"cpu_s": 1.0}, "cpu"),
    "a sleep": (SLEEP, {"wall_s": 0.3}, "time"),
    "endless output": ("while True: os.write(1, b'x' * 5000)", {}, "output"),
    "endless errors": ("while True: os.write(2, b'x' * 5000)", {}, "output"),
    "a large file": ("open('big', 'wb').write(bytes(64 << 20))", {}, "files"),
    "many files": (FILES.format(name="str(i)", then="pass"), {}, "files"),
    "removed files": (FILES.format(name="str(i)", then="os.unlink(str(i))"), {}, "files"),
    "files out of sight": (FILES.format(name="f'blind/{i}'", then="pass"), {}, "files"),
    "countless files": (
        "for i in range(100000): open(str(i), 'w').close()\ntime.sleep(5)",
        *({}, "files"),
    ),
}
"""Program, limits that differ, and the outcomes that may be."""


@pytest.mark.parametrize("what", LIMITED)
def test_what_takes_without_end_meets_its_limit(sandbox: Sandbox, what: str) -> None:
    source, limits, outcomes = LIMITED[what]
    finished = sandbox.run(source, limits=replace(LIMITS, **limits))
    assert finished.outcome in outcomes.split(), finished
    assert len(finished.stdout) + len(finished.stderr) <= LIMITS.output_bytes
    assert finished.peak_bytes < LIMITS.processes * LIMITS.memory_bytes


def test_children_that_share_their_memory_are_not_counted_twice(sandbox: Sandbox) -> None:
    source = """
x = bytearray(os.urandom(1 << 20) * 100)
for _ in range(5):
    if os.fork() == 0:
        time.sleep(0.5)
        os._exit(0)
for _ in range(5): os.wait()
print("done")
"""
    assert sandbox.run(source).stdout == b"done\n"


@pytest.mark.slow
def test_many_at_a_time_do_not_get_in_each_other_s_way(sandbox: Sandbox) -> None:
    source = """
import threading
threads = [threading.Thread(target=time.sleep, args=(0.2,)) for _ in range(LIMIT)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("done")
""".replace("LIMIT", str(LIMITS.processes - 1))
    with sandbox.unchanged(), ThreadPoolExecutor(12) as pool:
        command = sandbox.command(source)
        runs = [
            pool.submit(run, command, limits=LIMITS, mechanisms=sandbox.mechanisms)
            for _ in range(60)
        ]
        ends = [future.result() for future in runs]
    assert {end.stdout for end in ends} == {b"done\n"}, [end for end in ends if not end.ok]


def test_nobody_outlives_the_program(sandbox: Sandbox) -> None:
    source = """
if os.fork() == 0:
    for leave in (os.setsid, lambda: os.setpgid(0, 0)):
        try: leave()
        except OSError: pass
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.close(0); os.close(1); os.close(2)
        time.sleep(300)
    os._exit(0)
os.wait()
"""
    finished = sandbox.run(source)  # asserts that no process is left
    assert finished.ok, finished


ESCAPEES = """
for _ in range(3):
    if os.fork() == 0:
        try: os.setsid()
        except OSError: pass
        if os.fork() == 0:
            time.sleep(300)
        os._exit(0)
print("up", flush=True)
time.sleep(300)
"""


@pytest.mark.parametrize("how", ["kill", "death of the supervisor"])
def test_every_descendant_ends(sandbox: Sandbox, how: str) -> None:
    with sandbox.unchanged():
        process = sandbox.start(ESCAPEES)
        assert process.stdout.readline() == b"up\n"
        sandbox.until_running(4)
        if how != "kill":
            os.kill(process.pid, signal.SIGKILL)
            sandbox.until_gone()
        assert process.kill().outcome == "killed"


def test_the_parent_s_death_takes_every_descendant(sandbox: Sandbox) -> None:
    source = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
from sampler.sandbox import Limits, start
process = start(sys.argv[1:], limits=Limits(wall_s=None, cpu_s=None),
                mechanisms={list(sandbox.mechanisms)!r})
print(process.stdout.readline().decode(), end="", flush=True)
process.wait(None)
"""
    command = [sys.executable, "-c", source, sys.executable, "-I", "-S", "-c", PRELUDE + ESCAPEES]
    environment = {**os.environ, "TMPDIR": str(sandbox.directory)}
    with subprocess.Popen(
        [*command, sandbox.token], stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdout and parent.stdout.readline() == b"up\n"
        sandbox.until_running(5)
        parent.kill()
    sandbox.until_gone()
    eventually(lambda: not list(sandbox.directory.iterdir()), "the scratch directory's end")


def test_the_kernel_short_of_memory_takes_the_program_first(sandbox: Sandbox) -> None:
    with sandbox.unchanged():
        process = sandbox.start("time.sleep(300)")
        sandbox.until_running()
        scores = [Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in sandbox.processes()]
        process.kill()
    assert set(scores) == {"1000\n"}


def test_a_crash_leaves_no_core_and_is_told(sandbox: Sandbox) -> None:
    finished = sandbox.run("ctypes.string_at(0)")
    assert (finished.outcome, finished.code) == ("signal", -signal.SIGSEGV), finished
