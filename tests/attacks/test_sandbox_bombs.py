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

from sampler.sandbox import Finished, run
from sampler.sandbox.inside.limits import spare_user
from tests.attacks.sandboxed import LIMITS, PRELUDE, Sandbox
from tests.waiting import eventually

ROOT = Path(__file__).parents[2]


SLEEPERS = """
made = 0
try:
    while made < 100:
        if os.fork() == 0:
            time.sleep(300)
            os._exit(0)
        made += 1
    time.sleep(300)
finally:
    print(made, flush=True)
"""


def test_a_fork_bomb_stops_at_the_limit(sandbox: Sandbox) -> None:
    finished = sandbox.run(SLEEPERS)
    assert finished.outcome == "processes", finished
    assert stopped_by_kernel(sandbox, finished)


def stopped_by_kernel(sandbox: Sandbox, finished: Finished) -> bool:
    """Whether exactly the next process failed; outside of namespaces, and without a user of the
    program's own, all of the user's processes are counted together, and the supervisor ends who
    has too many."""
    if not sandbox.contained and spare_user() == os.geteuid():
        return finished.stdout != b"100\n"
    return int(finished.stdout) == LIMITS.processes - 1


def test_a_fork_bomb_that_never_gives_up_ends_in_time(sandbox: Sandbox) -> None:
    source = """
while True:
    try: os.fork()
    except OSError: pass
"""
    finished = sandbox.run(source, limits=replace(LIMITS, wall_s=1.0, cpu_s=None))
    assert finished.outcome in ("time", "processes"), finished


def test_a_bomb_of_threads_stops_at_the_limit(sandbox: Sandbox) -> None:
    source = """
import threading
made = 0
try:
    while made < 100:
        threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
        made += 1
    time.sleep(300)
finally:
    print(made, flush=True)
"""
    finished = sandbox.run(source)
    assert finished.outcome == "processes", finished
    assert stopped_by_kernel(sandbox, finished)


def test_a_memory_bomb_meets_its_limit(sandbox: Sandbox) -> None:
    finished = sandbox.run("x = bytearray(1 << 30)")
    assert (finished.outcome, finished.code) == ("memory", 1), finished


@pytest.mark.parametrize("kind", ["private", "shared"])
def test_children_each_below_the_limit_are_bounded_together(sandbox: Sandbox, kind: str) -> None:
    source = f"""
import mmap
for _ in range(6):
    if os.fork() == 0:
        x = bytearray(120 << 20) if {kind == "private"} else mmap.mmap(-1, 120 << 20)
        for i in range(0, len(x), 4096): x[i] = 1
        time.sleep(300)
time.sleep(300)
"""
    finished = sandbox.run(source)
    assert finished.outcome == "memory", finished
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


def test_an_endless_loop_meets_the_limit_on_cpu(sandbox: Sandbox) -> None:
    finished = sandbox.run("while True: pass", limits=replace(LIMITS, cpu_s=0.5))
    assert finished.outcome == "cpu"
    assert finished.cpu_s > 0.5


def test_loops_in_children_are_added_up(sandbox: Sandbox) -> None:
    source = """
signal.signal(signal.SIGXCPU, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        end = time.process_time() + 0.1
        while time.process_time() < end: pass
        os._exit(0)
    os.wait()
"""
    assert sandbox.run(source, limits=replace(LIMITS, cpu_s=1.0)).outcome == "cpu"


def test_a_sleep_meets_the_limit_on_time(sandbox: Sandbox) -> None:
    source = """
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
time.sleep(300)
"""
    assert sandbox.run(source, limits=replace(LIMITS, wall_s=0.3)).outcome == "time"


def test_endless_output_is_cut(sandbox: Sandbox) -> None:
    for stream in (1, 2):
        finished = sandbox.run(f"while True: os.write({stream}, b'x' * 5000)")
        assert finished.outcome == "output", finished.outcome
        assert len(finished.stdout) + len(finished.stderr) <= LIMITS.output_bytes


def test_one_file_stops_at_the_limit(sandbox: Sandbox) -> None:
    finished = sandbox.run("open('big', 'wb').write(bytes(LIMIT))".replace("LIMIT", "64 << 20"))
    assert finished.outcome == "files", finished


@pytest.mark.parametrize("keep", ["named", "removed"])
def test_many_files_are_bounded_together(sandbox: Sandbox, keep: str) -> None:
    source = f"""
held = []
for i in range(200):
    held.append(open(str(i), 'wb', buffering=0))
    if {keep == "removed"}: os.unlink(str(i))
    held[-1].write(bytes(1 << 20))
    time.sleep(0.01)
"""
    finished = sandbox.run(source)
    assert finished.outcome == "files", finished


def test_a_directory_that_cannot_be_looked_into_holds_nothing(sandbox: Sandbox) -> None:
    source = """
os.mkdir("blind", 0o300)
for i in range(200):
    open(f"blind/{i}", "wb").write(bytes(1 << 20))
    time.sleep(0.01)
"""
    finished = sandbox.run(source)
    assert finished.outcome == "files", finished


def test_countless_files_are_bounded(sandbox: Sandbox) -> None:
    finished = sandbox.run("for i in range(100000): open(str(i), 'w').close()\ntime.sleep(5)")
    assert finished.outcome == "files", finished


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


def test_kill_takes_every_descendant(sandbox: Sandbox) -> None:
    with sandbox.unchanged():
        process = sandbox.start(ESCAPEES)
        assert process.stdout.readline() == b"up\n"
        sandbox.until_running(4)
        assert process.kill().outcome == "killed"


def test_the_supervisor_s_death_takes_every_descendant(sandbox: Sandbox) -> None:
    with sandbox.unchanged():
        process = sandbox.start(ESCAPEES)
        assert process.stdout.readline() == b"up\n"
        sandbox.until_running(4)
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
