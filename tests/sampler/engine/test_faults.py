"""Death of the engine core or of its front: said at once, nothing left, the next load heals."""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from runspec.core.process import RunStopped
from sampler.engine import engine_process
from sampler.engine.engine import Engine, EngineDied, same_death_is_final
from sampler.engine.engine_process import starting
from sampler.engine.processes import SocketFolder, read_exit_reason, record_exit_reason
from tests.preloaded import Program
from tests.processes import alive, descendants, with_word
from tests.sampler.engine.models import (
    QWEN2,
    WAIT_S,
    batch,
    cpu_pool,
    save_version,
    tokens_of,
)
from tests.waiting import eventually

pytestmark = pytest.mark.slow
HOLD = "from tests.sampler.engine.models import hold_engines; hold_engines()"
HOLD_ALONE = f"""
from sampler.engine.processes import restart_with_libraries
restart_with_libraries()
{HOLD}
"""


@pytest.fixture
def sockets(monkeypatch):
    """The folder of vLLM's sockets. A socket's name must be short; pytest's folders have long
    ones."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", folder)
        yield Path(folder)


@pytest.mark.parametrize("fault", ["killed", "hangs"])
def test_a_core_that_dies_or_hangs_fails_what_is_under_way_and_a_load_starts_another(
    engine, untied, monkeypatch, fault
):
    # given an engine, and a core that stops answering before it is given work, and may then die
    expected = tokens_of(engine, batch())
    [core] = engine.pids
    os.kill(core, signal.SIGSTOP)
    if fault == "hangs":
        monkeypatch.setattr(engine_process, "ASK_S", 0.01)
        monkeypatch.setattr(engine_process, "SILENCE_S", 0.25)
    futures = [engine.submit(batch(16, 16)), engine.submit(batch(2, 2))]
    if fault == "killed":
        os.kill(core, signal.SIGKILL)
    # then everything under way says so, and so does what is asked next; the core is gone
    says = {"killed": "signal 9", "hangs": f"not answer within 0.25 s: .* process {core}"}[fault]
    for future in futures:
        with pytest.raises(EngineDied, match=says):
            future.result(WAIT_S)
    assert (engine.running, engine.version, alive(core)) == (0, None, False)
    with pytest.raises(EngineDied):
        engine.prompt_logprobs([[5, 6, 7]])
    with pytest.raises(RuntimeError, match="no version"):
        engine.submit(batch(1, 1))
    # and the next load starts another one, which samples the same
    monkeypatch.undo()
    engine.load(untied, 1)
    assert engine.pids != [core]
    assert tokens_of(engine, batch()) == expected


def test_a_core_that_is_slow_but_answers_is_left_alone(engine, monkeypatch):
    # given an engine that is asked for signs of life all the time
    asked, ask = queue.Queue(), engine._client.core._ask

    async def counted():
        asked.put(True)
        await ask()

    monkeypatch.setattr(engine_process, "ASK_S", 0.001)
    monkeypatch.setattr(engine._client.core, "_ask", counted)
    expected, [core] = tokens_of(engine, batch()), engine.pids
    # when its core stands still until it was asked, again and again
    for _ in range(3):
        asked.queue.clear()
        os.kill(core, signal.SIGSTOP)
        future = engine.submit(batch())
        assert asked.get(timeout=WAIT_S)
        assert not future.done()
        os.kill(core, signal.SIGCONT)
        # then it does its work all the same
        assert [r.output_tokens.tolist() for r in future.result(WAIT_S)] == expected
    assert engine.pids == [core]


def test_closing_ends_every_process_fails_what_is_under_way_and_leaves_no_sockets(untied, sockets):
    # given an engine at work, whose processes talk through sockets in a folder of their own; the
    # core stands still, so that the work does not end before
    threads, before = _threads_of_engines(), set(descendants())
    with closing(Engine(cpu_pool())) as engine:
        engine.load(untied, 0)
        [core] = engine.pids
        [folder] = sockets.iterdir()
        assert any(path.is_socket() for path in folder.iterdir())
        assert folder.stat().st_mode & 0o077 == 0
        os.kill(core, signal.SIGSTOP)
        future = engine.submit(batch(16, 16))
        # when it is closed
        engine.close()
        # then what was under way fails
        assert future.exception(WAIT_S) is not None
        # and no process, thread or socket of it is left; once more changes nothing
        assert not alive(core)
        assert _threads_of_engines() == threads
        assert set(descendants()) - before <= _trackers()
        assert list(sockets.iterdir()) == []


def test_an_engine_that_cannot_start_says_so(untied):
    extension = {"worker_extension_cls": "tests.sampler.engine.nowhere.Extension"}
    with closing(Engine(cpu_pool(), options=extension)) as engine:
        with pytest.raises(EngineDied, match="does not start"):
            engine.load(untied, 0)
        assert engine.version is None


def test_a_fault_of_the_core_is_the_message_and_final_if_it_comes_back(tmp_path):
    # given a model that vLLM starts with and cannot compute on CPUs
    version = save_version(tmp_path / "v0", family={**QWEN2, "hidden_size": 32, "head_dim": 16})
    reason = "RuntimeError: Unsupported CPU attention configuration: head_dim=16"
    with closing(Engine(cpu_pool())) as engine:
        # when it is loaded, then the error has the line of vLLM, and at the second time it is final
        with pytest.raises(EngineDied) as first:
            engine.load(version, 0)
        assert first.value.thing.startswith(f"vLLM has given the engine core up: {reason} ")
        with pytest.raises(RunStopped, match=reason), same_death_is_final(first.value):
            engine.load(version, 0)


def test_what_a_core_records_is_one_bounded_line_of_printable_characters(tmp_path, monkeypatch):
    folder = tmp_path / "rvllm-0"
    folder.mkdir()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(folder))
    logger = logging.getLogger("vllm.v1.engine.core")
    monkeypatch.setattr(logger, "handlers", [])
    assert read_exit_reason(folder) == ""
    record_exit_reason()
    for text in ("first", "\x1b[31mred\n  and\tmore " + "x" * 10**4):
        try:
            raise RuntimeError(text)
        except RuntimeError:
            logger.exception("a fatal error")
    reason = read_exit_reason(folder)
    assert reason.startswith("RuntimeError: ?[31mred and more xxx") and len(reason) == 400
    assert reason.isprintable()


def test_an_engine_is_closed_while_it_starts(untied):
    # given an engine whose core has been started and does not answer yet
    before, engine = set(descendants()), Engine(cpu_pool())
    running = set(multiprocessing.active_children())
    with ThreadPoolExecutor(1) as threads:
        loading = threads.submit(engine.load, untied, 0)
        eventually(lambda: set(multiprocessing.active_children()) - running, "a core starts")
        # when it is closed
        engine.close()
        # then the load says so, and nothing is left
        with pytest.raises(EngineDied, match="does not start"):
            loading.result(WAIT_S)
    assert set(descendants()) - before <= _trackers()


@pytest.mark.parametrize("told", [True, False], ids=["told to end", "hangs"])
def test_a_start_that_is_told_to_end_or_hangs_ends_what_it_starts(told):
    spawn = multiprocessing.get_context("spawn")
    # given a start that is to end before it has a process, or takes too long
    with starting(600.0 if told else 0.05) as start:
        if told:
            start.set()
        # when it starts one, then that ends
        process = spawn.Process(target=time.sleep, args=(600,), daemon=True)
        process.start()
        process.join()
    assert process.exitcode == -signal.SIGKILL


def front_of_its_own(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """A process that holds engines, from which the server and vLLM's fork as from a worker."""
    with log.open("wb") as out:
        command = [sys.executable, "-c", HOLD_ALONE, *arguments]
        return subprocess.Popen(command, stdout=out)


def forking_front(log: Path, *arguments: str) -> Program:
    """The same, which is forked from the server of `tests.preloaded`, as its processes are."""
    return Program(HOLD, *arguments, log=log)


@pytest.mark.parametrize(
    ("start", "kinds", "all_told"),
    [
        (forking_front, ["2,1"], True),
        pytest.param(front_of_its_own, ["1,1"], False, marks=pytest.mark.nightly),
        pytest.param(forking_front, ["1,2", "2,1"], False, marks=pytest.mark.nightly),
    ],
)
def test_no_process_of_vllms_outlives_its_front(
    untied, sockets, tmp_path, monkeypatch, start, kinds, all_told
):
    if len(os.sched_getaffinity(0)) < 2:
        kinds = ["1,1"]  # a rank needs a core
    # given a process with engines of some kinds of ranks
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    before, log = set(descendants()), tmp_path / "log"
    front = start(log, str(untied), *kinds)
    try:
        eventually(
            lambda: log.exists() and "started" in log.read_text(),
            "its engines have started",
            hopeless=lambda: "" if front.poll() is None else "it ended",
        )
        pids = set(descendants()) - before
        assert len(pids) > len(kinds)
        if start is front_of_its_own:  # then vLLM was imported once for all of them
            assert not pids & with_word("multiprocessing.forkserver")
        # when it ends without a chance to clean up, or all are told to end, as services are
        for pid in pids if all_told else ():
            with suppress(ProcessLookupError):  # the end of another was its own
                os.kill(pid, signal.SIGTERM)
    finally:
        front.kill()
    # then nothing of it stays
    _require_nothing_left(front, pids, before, sockets)


# of two that remove folders, the coordinator, two cores
@pytest.mark.parametrize(
    "processes", [pytest.param(n, marks=pytest.mark.nightly) for n in (2, 3, 4, 6)] + [5]
)
def test_no_process_of_vllms_outlives_a_front_that_is_killed_while_it_starts(
    untied, sockets, tmp_path, processes
):
    # given a process with an engine that is just starting one more process
    before = set(descendants())
    front = forking_front(tmp_path / "log", str(untied), "1,2")
    try:
        eventually(
            lambda: len(set(descendants()) - before) >= processes,
            f"it has started {processes - 1} processes",
        )
        pids = set(descendants()) - before
    # when it is killed
    finally:
        front.kill()
    # then nothing of it stays
    _require_nothing_left(front, pids, before, sockets)


def _require_nothing_left(
    front: subprocess.Popen[bytes] | Program, pids: set[int], before: set[int], folder: Path
) -> None:
    """No process of a front's that ends, and none of its sockets."""
    front.wait(WAIT_S)
    eventually(
        lambda: not any(alive(pid) for pid in pids | (set(descendants()) - before)),
        "its processes have ended",
    )
    eventually(lambda: not any(folder.iterdir()), "its sockets are gone")


@pytest.mark.parametrize(("name", "says"), [("x" * 80, "TMPDIR"), ("gone", "VLLM_RPC_BASE_PATH")])
def test_a_folder_that_sockets_cannot_lie_in_is_named(tmp_path, monkeypatch, name, says):
    folder = tmp_path / name
    if name != "gone":  # a folder of too long a name
        folder.mkdir()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(folder))
    with pytest.raises(UserError, match=says) as caught:
        SocketFolder()
    assert str(folder) in str(caught.value)
    assert list(folder.glob("*")) == []


def _threads_of_engines() -> set[str]:
    """Event loops of engines that are not closed."""
    return {
        thread.name + str(thread.ident)
        for thread in threading.enumerate()
        if thread.name.startswith("engine of")
    }


def _trackers() -> set[int]:
    """Python's own helper, of which a process keeps one."""
    from multiprocessing import resource_tracker

    return {resource_tracker._resource_tracker._pid}
