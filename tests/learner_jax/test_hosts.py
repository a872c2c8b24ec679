"""The learner as one process and as two: killed anywhere, it ends with the same bits."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.__main__ import main as bridge
from bridge.publisher import Publisher
from learner_jax.checkpoint import state_steps
from runspec.core.object_store import ObjectPath
from runspec.core.process import EXIT_USER_ERROR
from runspec.core.run_files import params_folder, state_folder, versions_in, weights_folder
from runspec.core.spec.resolved import dump_resolved
from runspec.core.spec.schema import Mesh
from tests.learner_jax.conftest import Run, changed, tiny_spec, write_initial_model
from tests.learner_jax.test_runner import assert_same_weights, lines, train_to_the_end, weights
from tests.object_store import BUCKET, s3_server
from tests.waiting import eventually, one_ended

pytestmark = pytest.mark.slow
DEADLINE_S = 120.0
HEARTBEAT_S = 10
DEVICES = 8
STEPS = 4


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled-programs")


def ready(path: Path, compiled: Path, *, hosts: int, batches: int = STEPS, **changes: Any) -> Run:
    """A run over eight devices, the first batches of its steps filed."""
    block: dict[str, Any] = {
        "hardware": {"kind": "cpu", "count": DEVICES},
        "hosts": hosts,
        "mesh": {"data": 2, "fsdp": 2, "tensor": 2},
        "packing": {"tokens": 64, "rows": 4},
        "compute_dtype": "float32",
        "compile_cache": str(compiled),
    }
    run = Run(path, tiny_spec(learner=block, **{"steps": STEPS, **changes}))
    write_initial_model(run)
    for step in range(batches):
        run.add_step(step, version=max(0, step - 1))
    return run


def own_folder(run: Run, folder: Path) -> Path:
    """A folder of a process that has nothing of the run but its spec."""
    own = folder / "own"
    own.mkdir()
    shutil.copyfile(run.path / "spec.json", own / "spec.json")
    return own


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def learner(run: Run, *folders: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """The run's learner, as many processes as its spec says; none outlives the block.

    Args:
        run: of process 0.
        folders: those of the other processes; by default the run's.
    """
    hosts, port = run.spec.learner.hosts, free_port()
    devices = f"--xla_force_host_platform_device_count={DEVICES // hosts}"  # the last one counts
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {devices}"}
    processes = []
    try:
        for index in range(hosts):
            joining = [f"--coordinator=127.0.0.1:{port}", f"--process={index}"]
            joining += [f"--heartbeat={HEARTBEAT_S}"]
            folder = folders[index - 1] if index and folders else run.path
            command = [sys.executable, "-m", "learner_jax", "train", str(folder)]
            with log_of(run, index).open("ab") as log:
                processes.append(
                    subprocess.Popen(
                        command + (joining if hosts > 1 else []),
                        env=environment,
                        stdout=log,
                        stderr=log,
                    )
                )
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()


def log_of(run: Run, index: int) -> Path:
    return run.path / f"learner-{index}.log"


def finish(run: Run) -> Run:
    with learner(run) as processes:
        assert [process.wait(DEADLINE_S) for process in processes] == [0] * len(processes)
    return run


def caught(
    moment: Callable[[], bool], what: str, processes: Sequence[subprocess.Popen[bytes]]
) -> None:
    """Waits for a moment that is soon over, while all processes are alive."""
    eventually(
        moment,
        what,
        deadline_s=DEADLINE_S,
        hopeless=lambda: one_ended(processes),
        poll_s=0.001,
    )


def trained(run: Run, steps: int) -> Callable[[], bool]:
    """A step is counted once its line is there; its version is then being written."""
    metrics = run.path / "metrics.jsonl"
    return lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= steps


def begun(folder: Path, name: str) -> Callable[[], bool]:
    """A checkpoint is being written, or, where we looked too late, just was."""
    return lambda: (folder / f".tmp-{name}").exists() or (folder / name).exists()


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Run:
    """A run of one process, this one, that nobody killed."""
    run = ready(tmp_path_factory.mktemp("one") / "run", compiled, hosts=1)
    train_to_the_end(run)
    return run


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Run:
    """A run of two processes that nobody killed; the batch manifest of a fifth step is not the
    coordinator's."""
    changes = {"steps": STEPS + 1, "checkpoints": {"every": 3, "keep": 2}}
    run = ready(tmp_path_factory.mktemp("two") / "run", compiled, hosts=2, **changes)
    folder = run.path / "rollouts" / f"step_{STEPS}"
    folder.mkdir()
    (folder / "batch.json").write_bytes(b"garbage")
    with learner(run) as processes:
        codes = [process.wait(DEADLINE_S) for process in processes]
    assert codes == [EXIT_USER_ERROR] * 2
    return run


def test_killed_anywhere_a_run_ends_with_the_same_bits(
    one: Run, compiled: Path, tmp_path: Path
) -> None:
    # given the same batches
    run = ready(tmp_path / "run", compiled, hosts=1)
    states, params = state_folder(run.path, run.spec), params_folder(run.path, run.spec)
    for moment in (
        trained(run, 1),  # in the middle of a step
        begun(states, "step_2"),  # while a full state is written
        begun(params, "v4"),  # between that state and the version after it
    ):
        # when the learner is killed, again and again
        with learner(run) as processes:
            caught(moment, "the moment", processes)
            processes[0].kill()
            processes[0].wait()
    finish(run)
    # then it has the parameters of the run that nobody killed
    assert_same_weights(weights(run, STEPS, tmp_path), weights(one, STEPS, tmp_path))
    # and every step its line, once
    assert [line["step"] for line in lines(run, "metrics")] == list(range(STEPS))
    assert [line["loss"] for line in lines(run, "metrics")] == [
        line["loss"] for line in lines(one, "metrics")
    ]
    # and the restarts compiled nothing again
    said = log_of(run, 0).read_text()
    assert said.count("programs from the cache") >= 3


def test_two_processes_train_what_one_does(one: Run, two: Run, tmp_path: Path) -> None:
    a, b = (weights(run, STEPS, tmp_path) for run in (one, two))
    for name in a:
        assert np.linalg.norm(a[name] - b[name]) <= 1e-5 * np.linalg.norm(a[name]), name
    for ours, theirs in zip(lines(two, "metrics"), lines(one, "metrics"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-7)
    # and only the first wrote a log of steps
    assert "step 3: " in log_of(two, 0).read_text()
    assert "step 3: " not in log_of(two, 1).read_text()


def test_one_of_two_is_killed_the_other_ends_and_the_run_goes_on_elsewhere(
    two: Run, compiled: Path, tmp_path: Path
) -> None:
    # given a run directory that only the first process knows: the other has a folder of its own
    shared = {"checkpoints": {"every": 2, "keep": 2, "dir": str(tmp_path / "shared")}}
    run = ready(tmp_path / "run", compiled, hosts=2, batches=3, **shared)
    own = own_folder(run, tmp_path)
    # and two processes, of which first the one is killed in its second step, then, after both
    # were started again, the other, a step past the full state
    for victim, steps in ((1, 1), (0, 3)):
        with learner(run, own) as processes:
            caught(trained(run, steps), "the steps", processes)
            processes[victim].kill()
            # then the one that is left ends by the heartbeat's deadline
            assert processes[1 - victim].wait(HEARTBEAT_S + 20) != 0
    # and says who is gone: process 1, and process 0, that of the coordination service
    assert "unhealthy (stopped sending heartbeats):\n1\n" in log_of(run, 0).read_text()
    assert "the leader task was preempted/died" in log_of(run, 1).read_text()
    # and the other's folder holds nothing else
    assert [path.name for path in own.iterdir()] == ["spec.json"]
    # and what they trained has the bits of the run that nobody killed
    assert_same_weights(weights(run, 2, tmp_path), weights(two, 2, tmp_path))
    assert "has the published bits" in log_of(run, 0).read_text()
    # when one process goes on from the full state, on two of the devices
    states, params = state_folder(run.path, run.spec), params_folder(run.path, run.spec)
    assert state_steps(states) == [2]
    run.add_step(3, version=2)
    run.spec = changed(run.spec, learner={"hosts": 1, "mesh": Mesh(fsdp=2)})
    (run.path / "spec.json").write_bytes(dump_resolved(run.spec))
    train_to_the_end(run)
    # then it trains what two would have, up to rounding
    # (Adam turns the rounding of a gradient that is nearly 0 into more than rounding)
    a, b = (weights(each, STEPS, tmp_path / str(i)) for i, each in enumerate((two, run)))
    for name in a:
        assert np.linalg.norm(a[name] - b[name]) <= 1e-4 * np.linalg.norm(a[name]), name
    # and the log has every step once
    assert [line["step"] for line in lines(run, "metrics")] == list(range(STEPS))
    assert versions_in(params)[-1] == STEPS
    assert json.loads((states / f"step_{STEPS}" / "state.json").read_bytes())["published"]


def test_in_an_object_store_too_a_killed_run_ends_with_the_same_bits(
    two: Run, compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        # given two processes that share an object store and nothing else
        checkpoints = {"every": 3, "keep": 2, "dir": f"s3://{BUCKET}/checkpoints"}
        run = ready(tmp_path / "run", compiled, hosts=2, checkpoints=checkpoints)
        own = own_folder(run, tmp_path)
        states = state_folder(run.path, run.spec)
        assert isinstance(states, ObjectPath)
        # when they are killed while they write a full state
        with learner(run, own) as processes:
            caught(lambda: bool((states / "step_3").names()), "the save", processes)
        assert state_steps(states) == []
        # and both are started again
        with learner(run, own) as processes:
            assert [process.wait(DEADLINE_S) for process in processes] == [0, 0]
        # then they have removed the half state, and trained what a run on a disk has
        assert "state/step_3 was never finished: removed" in log_of(run, 0).read_text()
        assert "has the published bits" in log_of(run, 0).read_text()
        assert state_steps(states) == [3, STEPS]
        assert_same_weights(weights(run, STEPS, tmp_path), weights(two, STEPS, tmp_path))
        # and the bridge and a publisher take it from there
        version = params_folder(run.path, run.spec) / f"v{STEPS}" / "params"
        out, model = tmp_path / "exported", run.path / "initial"
        assert bridge(["export", str(version), str(out), f"--model-dir={model}"]) == 0
        publisher = Publisher(run.path, run.spec, logging.getLogger("test"))
        assert publisher.publish_new() == list(range(STEPS + 1))
        assert (weights_folder(run.path) / f"v{STEPS}" / "probe.json").exists()
        assert versions_in(params_folder(run.path, run.spec)) == [STEPS]


def test_a_stop_signal_to_any_process_ends_all_with_their_state_saved(
    compiled: Path, tmp_path: Path
) -> None:
    # given two processes that wait for the batch of step 1
    run = ready(tmp_path / "run", compiled, hosts=2, batches=1)
    with learner(run) as processes:
        caught(trained(run, 1), "the first step", processes)
        # when the second is told to end
        processes[1].terminate()
        # then both do, in order
        assert [process.wait(DEADLINE_S) for process in processes] == [0, 0]
    assert state_steps(state_folder(run.path, run.spec)) == [1]


def test_an_error_of_the_first_ends_all_with_its_name_and_their_state_saved(two: Run) -> None:
    assert f"step_{STEPS}/batch.json" in log_of(two, 0).read_text()
    assert "process 0 of 2" in log_of(two, 1).read_text()
    assert state_steps(state_folder(two.path, two.spec)) == [3, STEPS]


def test_a_save_that_one_process_cannot_begin_leaves_no_other_waiting(
    compiled: Path, tmp_path: Path
) -> None:
    # given two processes that wait for the batch of step 1
    run = ready(tmp_path / "run", compiled, hosts=2, batches=1)
    states = state_folder(run.path, run.spec)
    with learner(run) as processes:
        caught(trained(run, 1), "the first step", processes)
        # when they are told to end, and the first cannot make the folder of the full state
        states.mkdir(parents=True, exist_ok=True)
        (states / ".tmp-step_1").touch()
        processes[1].terminate()
        # then both end, the second by the heartbeat's deadline
        assert processes[0].wait(DEADLINE_S) == EXIT_USER_ERROR
        assert processes[1].wait(HEARTBEAT_S + 20) != 0
    assert "cannot write a checkpoint" in log_of(run, 0).read_text()


def test_processes_that_do_not_share_checkpoints_are_told_so(
    compiled: Path, tmp_path: Path
) -> None:
    # given two processes, each with a run directory of its own, and no folder of checkpoints
    run = ready(tmp_path / "run", compiled, hosts=2, batches=0)
    own = own_folder(run, tmp_path)
    with learner(run, own) as processes:
        # then both end, and say what to set
        assert [each.wait(DEADLINE_S) for each in processes] == [EXIT_USER_ERROR] * 2
    for index in (0, 1):
        assert "remedy: set checkpoints.dir" in log_of(run, index).read_text()


def test_a_process_that_stays_alone_says_whom_it_waited_for(compiled: Path, tmp_path: Path) -> None:
    run = ready(tmp_path / "run", compiled, hosts=2, batches=0)
    for index in (0, 1):
        place = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "learner_jax", "train", str(run.path), "--join=2"]
        told = {"JAX_COORDINATOR_ADDRESS": place, "JAX_PROCESS_ID": str(index)}
        alone = subprocess.run(
            command, env={**os.environ, **told}, capture_output=True, text=True, timeout=DEADLINE_S
        )
        assert alone.returncode == EXIT_USER_ERROR
        assert f"process {index} of 2" in alone.stderr and place in alone.stderr
