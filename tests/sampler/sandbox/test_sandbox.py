"""The sandbox: programs that run and how they end, on this kernel and with what older ones have."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from sampler.sandbox import PYTHON, Limits, NotIsolated, probe, require, run, start
from sampler.sandbox import process as parent_side
from sampler.sandbox.__main__ import main
from sampler.sandbox.inside import control, kernel, launcher
from sampler.sandbox.inside.control import Order
from sampler.sandbox.process import SET_B, Finished, judge, resolve_paths
from tests.processes import alive
from tests.waiting import eventually

LIMITS = Limits(wall_s=600.0)
ROOT = Path(__file__).parents[3]
SANDBOX = Path(parent_side.__file__).parent
PROBE = sys.modules[probe.__module__]
BARE = [*PYTHON, "-S"]
WAIT_S = 600.0

pytestmark = pytest.mark.skipif(not probe().isolates, reason="nothing isolates on this machine")


def test_a_program_reads_its_input_and_its_files_and_answers():
    source = (
        "import os, sys, tempfile; from pathlib import Path; f = tempfile.NamedTemporaryFile();"
        "print(open('data/x').read() + sys.stdin.read(),"
        " str(Path.home()) == os.getcwd() == os.path.dirname(f.name))"
    )
    given = {"stdin": b" and in", "files": {"data/x": b"file"}}
    finished = run([*BARE, "-c", source], limits=LIMITS, **given)
    assert (finished.ok, finished.stdout) == (True, b"file and in True\n")
    # and input that nobody reads holds nothing up
    assert run([*BARE, "-c", "pass"], stdin=bytes(10 << 20), limits=LIMITS).ok


def test_a_persistent_program_answers_line_by_line_whatever_became_of_its_thread():
    source = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"
    limits = replace(LIMITS, wall_s=None, cpu_s=None)
    started = []
    command = [*BARE, "-c", source]
    starter = threading.Thread(target=lambda: started.append(start(command, limits=limits)))
    starter.start()
    starter.join()
    with started[0] as process:
        for word in (b"one\n", b"two\n"):
            process.stdin.write(word)
            process.stdin.flush()
            assert process.stdout.readline() == word.upper()
        # waiting in vain is a time-out and harms nothing
        with pytest.raises(TimeoutError):
            process.wait(0.05)
        process.stdin.close()
        assert process.wait(WAIT_S).ok


def test_a_program_can_be_killed_while_another_thread_waits_for_it():
    process = start([*BARE, "-c", "input()"], limits=LIMITS)
    ends: list[Finished] = []
    thread = threading.Thread(target=lambda: ends.append(process.wait(None)))
    thread.start()
    with pytest.raises(TimeoutError):
        process.wait(0.05)
    assert process.kill().outcome == "killed"
    thread.join()
    assert ends == [process.kill()]


def test_what_cannot_be_started_is_named(tmp_path):
    for command, readable, says in (
        ([str(tmp_path / "absent")], [], "not there"),
        ([str(Path(__file__))], [], "Permission denied"),
        (BARE, [tmp_path / "absent"], "not there"),
    ):
        with pytest.raises(NotIsolated, match=says):
            run(command, limits=LIMITS, readable=readable)
    for mechanisms in (("landlock",), ("seccomp",)):
        with pytest.raises(ValueError, match="isolate nothing"):
            start(BARE, limits=LIMITS, mechanisms=mechanisms)


def test_without_mechanisms_the_limits_hold_and_nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    # given a program that sees what its user sees, and a child of it that leaves its group
    source = (
        "import os, time; child = os.fork()\n"
        "if child == 0: os.setsid(); time.sleep(600)\n"
        f"print(child, os.path.exists({__file__!r}), *os.environ, flush=True); input()"
    )
    process = start([*BARE, "-c", source], limits=LIMITS, mechanisms=())
    child, sees, *variables = process.stdout.readline().split()
    assert sees == b"True" and b"PYTEST_CURRENT_TEST" not in variables
    # when it is ended
    process.kill()
    # then so is the child, and its directory is gone
    assert not alive(int(child)) and list(tmp_path.iterdir()) == []
    limits = replace(LIMITS, wall_s=0.2)
    loop = [*BARE, "-c", "while True: pass"]
    assert run(loop, limits=limits, mechanisms=()).outcome == "time"


def test_the_report_names_what_works_and_require_lets_it_be(capsys):
    require("pools.volunteers")
    assert main(["--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["isolates"] is True
    working = {name for name, row in said["mechanisms"].items() if row["works"]}
    assert working == set(probe().working)
    assert main([]) == 0
    assert "can be isolated here" in capsys.readouterr().out


def test_where_nothing_works_code_is_refused_with_the_remedy(monkeypatch, capsys):
    def failing(*_arguments: object, **_options: object) -> None:
        raise NotIsolated("forbidden here")

    monkeypatch.setattr(PROBE, "launch", failing)
    PROBE.probe.cache_clear()
    try:
        with pytest.raises(UserError, match="cannot be isolated") as raised:
            require("pools.volunteers")
        assert "user namespaces" in raised.value.remedy
        with pytest.raises(UserError):
            run(BARE, limits=LIMITS)
        assert main([]) == 1
        assert "BROKEN  landlock: forbidden here" in capsys.readouterr().out
    finally:
        PROBE.probe.cache_clear()


def test_root_that_cannot_be_anybody_else_is_told_so():
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        pytest.skip("needs root and setpriv")
    command = [setpriv, "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-m"]
    done = subprocess.run([*command, "sampler.sandbox"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("remedy: run it as an ordinary user") == 3


def test_paths_are_made_real_and_the_links_on_the_way_are_kept(tmp_path):
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "deep" / "up").symlink_to("..")
    real, links = resolve_paths([tmp_path / "link" / "deep" / "up", tmp_path / "real" / "deep"])
    assert real == [bytes(tmp_path / "real")]
    assert links == [(bytes(tmp_path / "link"), b"real")]
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(FileNotFoundError, match="too many"):
        resolve_paths([tmp_path / "round"])


def test_an_order_crosses_whole_or_not_at_all():
    sent = Order(command=[b"a", b""], environment={b"A": bytes(range(256))}, wall_s=1.5)
    message = control.encode_order(sent)
    read = control.read_order(BytesIO(message), BytesIO.read)
    assert read is not None and vars(read) == vars(sent)
    for short in (b"", message[:4], message[:-1]):
        assert control.read_order(BytesIO(short), BytesIO.read) is None


def test_an_answer_is_text_within_a_bound():
    here, there = os.pipe()
    control.answer(there, verdict="", failed="two\nlines", status=-9, wall_s=1.5)
    expected = {"verdict": "", "failed": "two lines", "status": "-9", "wall_s": "1.5"}
    assert control.read_answer(here) == expected
    for size in (control.MAX_ANSWER_BYTES + 1, 1 << 62):  # nothing of it is read
        os.write(there, size.to_bytes(8, "big"))
        assert control.read_answer(here) == {}
    os.write(there, (8).to_bytes(8, "big") + b"a \xff\x00 b\nc")  # whatever stands there
    assert control.read_answer(here) == {"a": "\ufffd\x00 b", "c": ""}
    os.close(there)
    os.close(here)


@pytest.mark.parametrize(
    ("told", "stderr", "wanted"),
    [
        ({"verdict": "", "status": "0"}, b"MemoryError", ("exit", 0)),
        ({"verdict": "", "status": "256"}, b"Trace\nMemoryError\n", ("memory", 1)),
        ({"verdict": "", "status": "256"}, b"MemoryError\nValueError: x\n", ("exit", 1)),
        ({"verdict": "", "status": "256"}, b"BlockingIOError: [Errno 11] x\n", ("processes", 1)),
        ({"verdict": "", "status": "256"}, b"OSError: [Errno 28] No space left\n", ("files", 1)),
        ({"verdict": "", "status": "11"}, b"", ("signal", -11)),
        ({"verdict": "", "status": "24"}, b"", ("cpu", -24)),
        ({}, b"", ("killed", -9)),
    ],
)
def test_the_end_is_told_from_status_and_last_words(told, stderr, wanted):
    finished = judge(told, stderr, LIMITS)
    assert (finished.outcome, finished.code) == wanted


def test_a_scratch_directory_goes_however_deep_and_closed(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    inner = top = tmp_path / "scratch"
    for _ in range(5):
        inner = inner / ".moved-1" / "d"
        inner.mkdir(parents=True)
        (inner / "link").symlink_to(outside)
        (inner / "file").touch()
    inner.chmod(0)
    (top / ".moved-1").chmod(0o300)
    launcher.remove_scratch(bytes(top))
    assert not top.exists()
    assert (outside / "kept").exists()
    launcher.remove_scratch(bytes(top))


def test_two_may_remove_one_scratch_directory(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as threads:
        for number in range(20):
            top = tmp_path / str(number)
            for name in range(30):
                (top / "a" / str(name) / "b").mkdir(parents=True)
                (top / str(name)).touch()
            list(threads.map(launcher.remove_scratch, [bytes(top)] * 2))
            assert not top.exists()


# -- The launcher's side, on kernels that this machine has not -------------------------------------


def plain(source: str, *arguments: str) -> str:
    """What a program that can import `inside` prints, not isolated."""
    head = f"import sys; sys.path.insert(0, {str(SANDBOX)!r})\n"
    command = [sys.executable, "-I", "-S", "-c", head + source, *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_launcher_imports_nothing_that_takes_its_time():
    loaded = set(plain("import inside.launcher; print(*sys.modules)").split())
    assert "inside.launcher" in loaded
    assert not loaded & {"re", "json", "typing", "dataclasses", "enum", "pathlib", "subprocess"}


@pytest.mark.parametrize("abi", range(1, 7))
def test_landlock_holds_with_the_rights_of_an_older_kernel(abi, tmp_path):
    if kernel.landlock_abi() < abi:
        pytest.skip(f"Landlock's ABI {abi} is not here")
    for name in ("readable", "writable", "outside"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    source = f"""
import os
from inside import kernel
kernel.landlock_abi = lambda: {abi}
kernel.prctl("", kernel.PR_SET_NO_NEW_PRIVS, 1)
top = sys.argv[1].encode()
kernel.restrict_files([top + b"/readable"], [top + b"/writable"], [b"/dev/null"])
for name in ("readable", "writable", "outside"):
    for mode in ("r", "a", "x"):
        path = os.path.join(sys.argv[1], name, "new" if mode == "x" else "file")
        try: open(path, mode)
        except PermissionError: continue
        print(name, mode)
"""
    done = plain(source, str(tmp_path)).split("\n")
    assert done[:-1] == ["readable r", "writable r", "writable a", "writable x"]


def test_where_init_does_not_end_in_time_all_below_it_ends_in_every_group(monkeypatch):
    # given an init process that ignores the signal to end, and a program in another group
    source = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
signal.pause()
"""
    monkeypatch.setattr(launcher, "_END_S", 0.0)
    with subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE) as init:
        program = int(init.stdout.readline())
        # when it is to end
        launcher._end(init.pid, contained=False)
    # then nothing is left
    eventually(lambda: not alive(init.pid) and not alive(program), "both have ended")


def test_where_landlock_does_not_scope_signals_the_filter_refuses_them(monkeypatch):
    if not set(SET_B) <= set(probe().working):
        pytest.skip("set B is not available here")
    monkeypatch.setattr(parent_side, "landlock_abi", lambda: 5)

    def program(source: str) -> Finished:
        command = [sys.executable, "-I", "-S", "-c", source]
        return run(command, limits=replace(LIMITS, processes=8), mechanisms=SET_B)

    finished = program("""
import os, threading
thread = threading.Thread(target=print, args=("thread",))
thread.start(); thread.join()
child = os.fork()
if child == 0: os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for pid in (os.getppid(), os.getpid(), -1):
    try: os.kill(pid, 0)
    except PermissionError: print("refused")
os.kill(0, 9)
""")
    assert (finished.outcome, finished.code) == ("signal", -9), finished
    assert program("import os; os.abort()").outcome == "signal"


def test_children_are_found_without_the_kernel_s_list():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert child.pid in control._by_parent()(os.getpid())
        assert child.pid in control.descendants(os.getpid())
        child.communicate(b"\n")


def test_an_ordinary_user_s_other_tasks_do_not_count_against_the_program():
    user = os.geteuid()
    mine = kernel.tasks_of(user)
    assert mine >= 1
    assert kernel.tasks_allowed(8, user, contained=False) >= mine / 2 + 8
    assert kernel.tasks_allowed(8, user + 1, contained=False) == 8
    assert kernel.tasks_allowed(8, user, contained=True) >= 9
