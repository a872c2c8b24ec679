"""What a caller of the sandbox sees: programs that run, and how they end."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from sampler.sandbox import PYTHON, Limits, NotIsolated, probe, require, run, start
from sampler.sandbox import probe as probe_function
from sampler.sandbox.__main__ import main
from sampler.sandbox.inside import messages
from sampler.sandbox.inside.init_process import remove_scratch
from sampler.sandbox.inside.messages import Order, unpack
from sampler.sandbox.limits import Finished, judge
from sampler.sandbox.process import resolve_paths
from tests.processes import alive

LIMITS = Limits(wall_s=30.0)
ROOT = Path(__file__).parents[3]
BARE = [*PYTHON, "-S"]

pytestmark = pytest.mark.skipif(not probe().isolates, reason="nothing isolates on this machine")


def test_a_program_reads_its_input_and_its_files_and_answers() -> None:
    source = "import sys; print(open('data/x').read() + sys.stdin.read())"
    finished = run(
        [*BARE, "-c", source], stdin=b" and in", limits=LIMITS, files={"data/x": b"file"}
    )
    assert finished.ok
    assert finished.stdout == b"file and in\n"


def test_input_that_nobody_reads_holds_nothing_up() -> None:
    assert run([*BARE, "-c", "pass"], stdin=bytes(10 << 20), limits=LIMITS).ok


def test_the_scratch_directory_is_home_and_writable() -> None:
    source = (
        "import os, tempfile; from pathlib import Path; f = tempfile.NamedTemporaryFile(); "
        "print(str(Path.home()) == os.getcwd() == os.path.dirname(f.name))"
    )
    assert run([*BARE, "-c", source], limits=LIMITS).stdout == b"True\n"


def test_a_persistent_program_answers_line_by_line() -> None:
    source = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"
    limits = replace(LIMITS, wall_s=None, cpu_s=None)
    with start([*BARE, "-c", source], limits=limits) as process:
        for word in (b"one\n", b"two\n"):
            process.stdin.write(word)
            process.stdin.flush()
            assert process.stdout.readline() == word.upper()
        process.stdin.close()
        assert process.wait(30).ok


def test_waiting_in_vain_is_a_time_out_and_harms_nothing() -> None:
    with start([*BARE, "-c", "input()"], limits=LIMITS) as process:
        with pytest.raises(TimeoutError):
            process.wait(0.05)
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(30).ok


def test_a_program_can_be_killed_while_another_thread_waits_for_it() -> None:
    process = start([*BARE, "-c", "input()"], limits=LIMITS)
    ends: list[Finished] = []
    thread = threading.Thread(target=lambda: ends.append(process.wait(None)))
    thread.start()
    with pytest.raises(TimeoutError):
        process.wait(0.05)
    assert process.kill().outcome == "killed"
    thread.join()
    assert ends == [process.kill()]


def test_a_thread_that_started_a_program_may_end_before_it() -> None:
    started = []
    thread = threading.Thread(target=lambda: started.append(start([*BARE, "-c", "input()"],
                                                                  limits=LIMITS)))  # fmt: skip
    thread.start()
    thread.join()
    with started[0] as process:
        process.stdin.write(b"\n")
        process.stdin.close()
        assert process.wait(30).ok


def test_a_program_that_is_not_there_is_told(tmp_path: Path) -> None:
    with pytest.raises(NotIsolated, match="not there"):
        run([str(tmp_path / "absent")], limits=LIMITS)
    with pytest.raises(NotIsolated, match="Permission denied"):
        run([str(Path(__file__))], limits=LIMITS)
    with pytest.raises(NotIsolated, match="not there"):
        run(BARE, limits=LIMITS, readable=[tmp_path / "absent"])


def test_mechanisms_that_isolate_nothing_are_not_taken() -> None:
    for mechanisms in (("landlock",), ("seccomp",)):
        with pytest.raises(ValueError, match="isolate nothing"):
            start(BARE, limits=LIMITS, mechanisms=mechanisms)


def test_without_mechanisms_the_limits_hold_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    limits = replace(LIMITS, wall_s=0.5)
    loop = [*BARE, "-c", "while True: pass"]
    assert run(loop, limits=limits, mechanisms=()).outcome == "time"


def test_the_report_names_what_works_and_require_lets_it_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    require("pools.volunteers")
    assert main(["--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["isolates"] is True
    assert {name for name, row in said["mechanisms"].items() if row["works"]} == set(
        probe().working
    )
    assert main([]) == 0
    assert "can be isolated here" in capsys.readouterr().out


def test_where_nothing_works_code_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = sys.modules[probe_function.__module__]
    monkeypatch.setattr(module, "launch", _failing_start)
    module.probe.cache_clear()
    try:
        with pytest.raises(UserError, match="cannot be isolated") as raised:
            require("pools.volunteers")
        assert "user namespaces" in raised.value.remedy
        with pytest.raises(UserError):
            run(BARE, limits=LIMITS)
        assert main([]) == 1
        assert "BROKEN  landlock: forbidden here" in capsys.readouterr().out
    finally:
        module.probe.cache_clear()


def test_root_that_cannot_be_anybody_else_is_told_so() -> None:
    setpriv = shutil.which("setpriv")
    if os.geteuid() != 0 or setpriv is None:
        pytest.skip("needs root and setpriv")
    command = [setpriv, "--bounding-set=-all", "--inh-caps=-all", sys.executable, "-m"]
    done = subprocess.run(
        [*command, "sampler.sandbox"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("remedy: run it as an ordinary user") == 3


def _failing_start(*_arguments: object, **_options: object) -> None:
    raise NotIsolated("forbidden here")


def test_paths_are_made_real_and_the_links_on_the_way_are_kept(tmp_path: Path) -> None:
    (tmp_path / "real" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "real" / "deep" / "up").symlink_to("..")
    real, links = resolve_paths([tmp_path / "link" / "deep" / "up", tmp_path / "real" / "deep"])
    assert real == [bytes(tmp_path / "real")]
    assert links == [(bytes(tmp_path / "link"), b"real")]
    (tmp_path / "round").symlink_to("round")
    with pytest.raises(FileNotFoundError, match="too many"):
        resolve_paths([tmp_path / "round"])


def test_an_order_crosses_whole_or_not_at_all() -> None:
    order = Order()
    order.command, order.environment, order.wall_s = [b"a", b""], {b"A": bytes(range(256))}, 1.5
    message = messages.encode_order(vars(order))
    assert vars(unpack(messages.read_order(BytesIO(message), BytesIO.read))) == vars(order)
    for short in (b"", message[:4], message[:-1]):
        assert messages.read_order(BytesIO(short), BytesIO.read) == {}


def test_an_answer_is_text_within_a_bound() -> None:
    here, there = os.pipe()
    messages.answer(there, verdict="", failed="two\nlines", status=-9, wall_s=1.5)
    assert messages.read_answer(here) == {
        "verdict": "",
        "failed": "two lines",
        "status": "-9",
        "wall_s": "1.5",
    }
    for size in (messages.MAX_ANSWER_BYTES + 1, 1 << 62):  # nothing of it is read
        os.write(there, size.to_bytes(8, "big"))
        assert messages.read_answer(here) == {}
    os.write(there, (8).to_bytes(8, "big") + b"a \xff\x00 b\nc")  # whatever stands there
    assert messages.read_answer(here) == {"a": "\ufffd\x00 b", "c": ""}
    os.close(there)
    os.close(here)


@pytest.mark.parametrize(
    ("status", "stderr", "wanted"),
    [
        (0, b"MemoryError", ("exit", 0)),
        (256, b"Trace\nMemoryError\n", ("memory", 1)),
        (256, b"MemoryError\nValueError: x\n", ("exit", 1)),
        (256, b"BlockingIOError: [Errno 11] x\n", ("processes", 1)),
        (256, b"OSError: [Errno 28] No space left on device\n", ("files", 1)),
        (11, b"", ("signal", -11)),
        (24, b"", ("cpu", -24)),
    ],
)
def test_the_end_is_told_from_status_and_last_words(
    status: int, stderr: bytes, wanted: tuple[str, int]
) -> None:
    finished = judge({"verdict": "", "status": str(status)}, stderr, LIMITS)
    assert (finished.outcome, finished.code) == wanted


def test_without_a_last_message_the_program_was_killed() -> None:
    assert judge({}, b"", LIMITS) == Finished("killed", -9)


def test_a_scratch_directory_goes_however_deep_and_closed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    top = tmp_path / "scratch"
    inner = top
    for _ in range(5):
        inner = inner / ".moved-1" / "d"
        inner.mkdir(parents=True)
        (inner / "link").symlink_to(outside)
        (inner / "file").touch()
    inner.chmod(0)
    (top / ".moved-1").chmod(0o300)
    remove_scratch(bytes(top))
    assert not top.exists()
    assert (outside / "kept").exists()
    remove_scratch(bytes(top))
