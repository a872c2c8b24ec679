"""Death of the engine core or of its front: said at once, nothing left, the next load heals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from runspec.core.errors import UserError
from sampler.engine import engine as engine_module
from sampler.engine.engine import Engine, EngineDied
from sampler.engine.engine_process import Start, exit_code
from sampler.engine.processes import SocketFolder
from tests.preloaded import Program
from tests.processes import alive, cpu_seconds, descendants, with_word
from tests.sampler.engine.requests import WAIT_S, batch
from tests.waiting import eventually

pytestmark = pytest.mark.slow
IDLE_S, IDLE_CPU_S = 2.0, 0.1
ORPHAN_MAKER = """
import runpy
runpy.run_module("tests.sampler.engine.orphan_maker", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A socket's name must be short; pytest's folders have long ones."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def test_a_core_that_is_killed_fails_what_is_under_way_and_a_load_starts_another(
    engine: Engine, untied: Path
) -> None:
    # given an engine at work
    expected = engine.submit(batch()).result(WAIT_S)
    [core] = engine.pids
    futures = [engine.submit(batch(16, 16)), engine.submit(batch(2, 2))]
    # when its core is killed
    os.kill(core, signal.SIGKILL)
    # then everything under way says so, and so does what is asked next
    for future in futures:
        with pytest.raises(EngineDied, match="signal 9"):
            future.result(WAIT_S)
    assert engine.running == 0
    assert engine.version is None
    with pytest.raises(EngineDied):
        engine.prompt_logprobs([[5, 6, 7]])
    with pytest.raises(RuntimeError, match="no version"):
        engine.submit(batch(1, 1))
    # and the next load starts another one, which samples the same
    engine.load(untied, 1)
    again = engine.submit(batch()).result(WAIT_S)
    assert [r.output_tokens.tolist() for r in again] == [r.output_tokens.tolist() for r in expected]


def test_an_engine_that_cannot_start_says_so(
    new_engine: Callable[..., Engine], untied: Path
) -> None:
    engine = new_engine(worker_extension_cls="tests.sampler.engine.broken.BrokenExtension")

    with pytest.raises(EngineDied, match="does not start"):
        engine.load(untied, 0)

    assert engine.version is None


def test_closing_ends_every_process_fails_what_is_under_way_and_leaves_no_sockets(
    new_engine: Callable[..., Engine],
    untied: Path,
    short_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # given an engine at work, whose processes talk through sockets in a folder of their own
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(short_folder))
    before, engine = set(descendants()), new_engine()
    threads = _threads_of_engines()
    engine.load(untied, 0)
    [core] = engine.pids
    [folder] = short_folder.iterdir()
    assert any(path.is_socket() for path in folder.iterdir())
    assert folder.stat().st_mode & 0o077 == 0
    future = engine.submit(batch(16, 16))
    # when it is closed
    engine.close()
    # then what was under way fails
    assert future.exception(WAIT_S) is not None
    # and no process, thread or socket of it is left
    assert not alive(core)
    assert _threads_of_engines() < threads
    assert set(descendants()) - before <= _trackers()
    assert list(short_folder.iterdir()) == []
    engine.close()  # and once more changes nothing


def test_an_engine_is_closed_while_it_starts(
    new_engine: Callable[..., Engine], untied: Path
) -> None:
    # given an engine whose core has been started and does not answer yet
    before, engine = set(descendants()), new_engine()
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


def test_an_engine_is_closed_just_before_it_starts(
    new_engine: Callable[..., Engine], untied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given an engine that is closed after its load has begun, and before it starts a process
    before, engine = set(descendants()), new_engine()
    with ThreadPoolExecutor(2) as threads:
        arguments = engine_module.engine_arguments

        def closed_first(*args: Any) -> dict[str, Any]:
            threads.submit(engine.close)
            time.sleep(0.5)
            return arguments(*args)

        monkeypatch.setattr(engine_module, "engine_arguments", closed_first)
        # when it loads, then nothing is started
        with pytest.raises(EngineDied, match="the engine was closed"):
            engine.load(untied, 0)
    assert set(descendants()) - before <= _trackers()


@pytest.mark.parametrize("told", [True, False], ids=["told to end", "hangs"])
def test_a_start_that_is_told_to_end_or_hangs_ends_what_it_starts(told: bool) -> None:
    spawn = multiprocessing.get_context("spawn")
    # given a start that is to end before it has a process, or takes too long
    with Start(600.0 if told else 0.2) as start:
        if told:
            start.kill()
            time.sleep(0.3)
        # when it starts one, then that ends
        process = spawn.Process(target=time.sleep, args=(600,), daemon=True)
        process.start()
        process.join(WAIT_S)
    assert process.exitcode == -signal.SIGKILL


def test_a_core_that_ended_has_its_exit_code_whoever_else_asks_for_it() -> None:
    spawn = multiprocessing.get_context("spawn")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(8):
            # given a child whose end another thread waits for too
            process = spawn.Process(target=time.sleep, args=(600,), daemon=True)
            process.start()
            watch = threading.Thread(target=_ask_until_it_ends, args=(process,))
            watch.start()
            # when it is killed, then both are told how it ended
            process.kill()
            assert exit_code(process) == -signal.SIGKILL
            watch.join()
    finally:
        sys.setswitchinterval(interval)


def _ask_until_it_ends(process: BaseProcess) -> None:
    while process.exitcode is None:
        pass


def front_of_its_own(log: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """The process of `orphan_maker`, from which the server and vLLM's fork as from a worker."""
    with log.open("wb") as out:
        command = [sys.executable, "-c", ORPHAN_MAKER, *arguments]
        return subprocess.Popen(command, stdout=out)


def forking_front(log: Path, *arguments: str) -> Program:
    """The same, which is forked from the server of `tests.preloaded`, as its processes are."""
    return Program(ORPHAN_MAKER, *arguments, log=log)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("start", "kinds", "all_told"),
    [(front_of_its_own, ["1,1"], False), (forking_front, ["1,2", "2,1"], True)],
)
def test_no_process_of_vllms_outlives_its_front(
    untied: Path,
    short_folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    start: Callable[..., subprocess.Popen[bytes] | Program],
    kinds: list[str],
    all_told: bool,
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        kinds = ["1,1"]  # a rank needs a core
    # given a process with engines of some kinds of ranks
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(short_folder))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    before, log = set(descendants()), tmp_path / "log"
    front = start(log, str(untied), *kinds)
    try:
        eventually(
            lambda: log.exists() and "started" in log.read_text(),
            "its engines have started",
            deadline_s=600,
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
    _require_nothing_left(front, pids, before, short_folder)


@pytest.mark.timeout(900)
def test_no_process_of_vllms_outlives_a_front_that_is_killed_while_it_starts(
    untied: Path, short_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(short_folder))
    for processes in range(2, 7):  # two that remove folders, the coordinator, two cores
        # given a process with an engine that is just starting one more process
        before = set(descendants())
        front = forking_front(tmp_path / "log", str(untied), "1,2")
        try:
            eventually(
                lambda before=before, n=processes: len(set(descendants()) - before) >= n,
                f"it has started {processes - 1} processes",
                deadline_s=WAIT_S,
            )
            pids = set(descendants()) - before
        # when it is killed
        finally:
            front.kill()
        # then nothing of it stays
        _require_nothing_left(front, pids, before, short_folder)


def _require_nothing_left(
    front: subprocess.Popen[bytes] | Program, pids: set[int], before: set[int], folder: Path
) -> None:
    """No process of a front's that ends, and none of its sockets."""
    front.wait(WAIT_S)
    eventually(
        lambda: not any(alive(pid) for pid in pids | (set(descendants()) - before)),
        "its processes have ended",
        deadline_s=WAIT_S,
    )
    eventually(lambda: not any(folder.iterdir()), "its sockets are gone", deadline_s=WAIT_S)


@pytest.mark.parametrize(("name", "says"), [("x" * 80, "TMPDIR"), ("gone", "VLLM_RPC_BASE_PATH")])
def test_a_folder_that_sockets_cannot_lie_in_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    folder = tmp_path / name
    if name != "gone":  # a folder of too long a name
        folder.mkdir()
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(folder))
    with pytest.raises(UserError, match=says) as caught:
        SocketFolder()
    assert str(folder) in str(caught.value)
    assert list(folder.glob("*")) == []


def test_an_idle_engine_uses_no_cpu(engine: Engine) -> None:
    # given an engine that has sampled, and has nothing to do
    engine.submit(batch()).result(WAIT_S)
    [core] = engine.pids
    # when time passes
    before = cpu_seconds(core)
    threading.Event().wait(IDLE_S)
    # then its core has slept
    assert cpu_seconds(core) - before < IDLE_CPU_S


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
