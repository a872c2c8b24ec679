"""The learner as several processes: what one trains, stopped, killed and alone; a publisher's."""

from __future__ import annotations

import json
import logging
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.__main__ import main as bridge
from bridge.publisher import Publisher
from learner_jax import distributed
from learner_jax.checkpoint import state_steps
from learner_jax.distributed import joined, mesh_devices
from runspec.core.errors import UserError
from runspec.core.files import ObjectPath
from runspec.core.process import EXIT_USER_ERROR
from runspec.core.run_files import params_folder, state_folder, versions_in, weights_folder
from runspec.core.schema.load import dump_resolved
from tests.learner_jax.conftest import Run, changed, tiny_spec
from tests.learner_jax.test_runner import (
    assert_same_weights,
    lines,
    ready_run,
    train_to_the_end,
    weights,
)
from tests.object_store import BUCKET, s3_server
from tests.waiting import eventually, one_ended

pytestmark = pytest.mark.slow

LOG = logging.getLogger("test")
STEPS = 4
Processes = list[subprocess.Popen[bytes]]
HOST = """
import sys
from pathlib import Path
from learner_jax.__main__ import learn
from runspec.core.process import leave, run_role
from runspec.core.process import Role

role, waits = Role.load("learner", Path(sys.argv[1])), map(int, sys.argv[2:])
waits = dict(zip(("join_s", "heartbeat_s"), waits, strict=True))
leave(run_role("learner", lambda log: learn(role, log, **waits)))
"""
"""A process of the learner that waits as long as is said: FOLDER JOIN_S HEARTBEAT_S."""


def ready(path: Path, compiled: Path, *, batches: int = STEPS, **changes: Any) -> Run:
    """A run of two processes with a device each, the first batches of its steps filed."""
    learner = tiny_spec().learner.model_dump() | {"hosts": 2, "compile_cache": str(compiled)}
    return ready_run(path, batches=range(batches), learner=learner, **changes)


def own_folder(run: Run, folder: Path) -> Path:
    """A folder of a process that has nothing of the run but its spec."""
    own = folder / "own"
    own.mkdir()
    shutil.copyfile(run.path / "spec.json", own / "spec.json")
    return own


@contextmanager
def reserved_port() -> Iterator[int]:
    """A port that nobody but a server of this user's is given."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as the coordinator does
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def place_of(port: int, index: int) -> dict[str, str]:
    """Environment of a process that says where it finds the others."""
    return {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_PROCESS_ID": str(index)}


@contextmanager
def learners(run: Run, other: Path | None = None, *, heartbeat_s: int = 600) -> Iterator[Processes]:
    """The run's two processes; neither outlives the block.

    Args:
        run: of process 0.
        other: folder of process 1; by default the run's.
        heartbeat_s: silence after which a process counts as dead.
    """
    one_device = "--xla_force_host_platform_device_count=1"  # the last one counts
    environment = {**os.environ, "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} {one_device}"}
    processes: Processes = []
    with reserved_port() as port:
        try:
            for index, folder in enumerate((run.path, other or run.path)):
                command = [sys.executable, "-c", HOST, str(folder), "600", str(heartbeat_s)]
                own = environment | place_of(port, index)
                with log_of(run, index).open("ab") as log:
                    processes.append(subprocess.Popen(command, env=own, stdout=log, stderr=log))
            yield processes
        finally:
            for process in processes:
                process.kill()
                process.wait()


def log_of(run: Run, index: int) -> Path:
    return run.path / f"learner-{index}.log"


def codes_of(processes: Processes) -> list[int]:
    return [process.wait() for process in processes]


def caught(moment: Callable[[], bool], what: str, processes: Processes) -> None:
    """Waits for a moment while all processes are alive."""
    eventually(moment, what, hopeless=lambda: one_ended(processes))


def trained(run: Run, steps: int) -> Callable[[], bool]:
    """A step is counted once its line is there; its version is then being written."""
    metrics = run.path / "metrics.jsonl"
    return lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= steps


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, compiled: Path) -> Run:
    """A run of two processes that nobody killed; the batch manifest of a fifth step is not the
    coordinator's."""
    changes = {"steps": STEPS + 1, "checkpoints": {"every": 3, "keep": 2}}
    run = ready(tmp_path_factory.mktemp("two") / "run", compiled, **changes)
    folder = run.path / "rollouts" / f"step_{STEPS}"
    folder.mkdir()
    (folder / "batch.json").write_bytes(b"garbage")
    with learners(run) as processes:
        assert codes_of(processes) == [EXIT_USER_ERROR] * 2
    return run


def test_two_processes_train_what_one_does_and_an_error_of_the_first_ends_both(two, tmp_path):
    # given the same run of one process
    one = ready_run(tmp_path / "run")
    train_to_the_end(one)
    # then both have the same parameters and losses
    a, b = (weights(run, STEPS, tmp_path) for run in (one, two))
    for name in a:
        assert np.linalg.norm(a[name] - b[name]) <= 1e-5 * np.linalg.norm(a[name]), name
    for ours, theirs in zip(lines(two, "metrics"), lines(one, "metrics"), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=1e-7)
    # and only the first wrote a log of steps, and named the file that it could not believe
    first, second = (log_of(two, index).read_text() for index in (0, 1))
    assert "step 3: " in first and f"step_{STEPS}/batch.json" in first
    assert "step 3: " not in second and "process 0 of 2" in second
    # and their state is saved
    assert state_steps(state_folder(two.path, two.spec)) == [3, STEPS]


@pytest.mark.nightly
def test_one_of_two_is_killed_the_other_ends_and_the_run_goes_on_elsewhere(two, compiled, tmp_path):
    # given a run directory that only the first process knows: the other has a folder of its own
    shared = {"every": 2, "keep": 2, "dir": str(tmp_path / "shared")}
    run = ready(tmp_path / "run", compiled, batches=3, checkpoints=shared)
    own = own_folder(run, tmp_path)
    # and two processes, of which first the one is killed in its second step, then, after both
    # were started again, the other, a step past the full state
    for victim, steps in ((1, 1), (0, 3)):
        with learners(run, own, heartbeat_s=30) as processes:
            caught(trained(run, steps), "the steps", processes)
            processes[victim].kill()
            # then the one that is left ends by the heartbeat's deadline
            assert processes[1 - victim].wait() != 0
    # and says who is gone: process 1, and process 0, that of the coordination service
    assert "unhealthy (stopped sending heartbeats):\n1\n" in log_of(run, 0).read_text()
    assert "the leader task was preempted/died" in log_of(run, 1).read_text()
    # and the other's folder holds nothing else
    assert [path.name for path in own.iterdir()] == ["spec.json"]
    # and what they trained has the bits of the run that nobody killed
    assert_same_weights(weights(run, 2, tmp_path), weights(two, 2, tmp_path))
    assert "has the published bits" in log_of(run, 0).read_text()
    # when one process goes on from the full state
    states, params = state_folder(run.path, run.spec), params_folder(run.path, run.spec)
    assert state_steps(states) == [2]
    run.add_step(3, version=2)
    run.spec = changed(run.spec, learner={"hosts": 1})
    (run.path / "spec.json").write_bytes(dump_resolved(run.spec))
    train_to_the_end(run)
    # then it trains what two would have, up to rounding
    # (Adam turns the rounding of a gradient that is nearly 0 into more than rounding)
    a, b = (weights(each, STEPS, tmp_path / str(i)) for i, each in enumerate((two, run)))
    for name in a:
        assert np.linalg.norm(a[name] - b[name]) <= 1e-4 * np.linalg.norm(a[name]), name
    assert [line["step"] for line in lines(run, "metrics")] == list(range(STEPS))
    assert versions_in(params)[-1] == STEPS
    assert json.loads((states / f"step_{STEPS}" / "state.json").read_bytes())["published"]


@pytest.mark.nightly
def test_in_an_object_store_too_a_killed_run_ends_with_the_same_bits(
    two, compiled, tmp_path, monkeypatch
):
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        # given two processes that share an object store and nothing else
        checkpoints = {"every": 3, "keep": 2, "dir": f"s3://{BUCKET}/checkpoints"}
        run = ready(tmp_path / "run", compiled, checkpoints=checkpoints)
        own = own_folder(run, tmp_path)
        states = state_folder(run.path, run.spec)
        assert isinstance(states, ObjectPath)
        # when they are killed while they write a full state
        with learners(run, own) as processes:
            caught(lambda: bool((states / "step_3").names()), "the save", processes)
        assert state_steps(states) == []
        # and both are started again
        with learners(run, own) as processes:
            assert codes_of(processes) == [0, 0]
        # then they have removed the half state, and trained what a run on a disk has
        assert "state/step_3 was never finished: removed" in log_of(run, 0).read_text()
        assert state_steps(states) == [3, STEPS]
        assert_same_weights(weights(run, STEPS, tmp_path), weights(two, STEPS, tmp_path))
        # and the bridge and a publisher take it from there
        version = params_folder(run.path, run.spec) / f"v{STEPS}" / "params"
        out, model = tmp_path / "exported", run.path / "initial"
        assert bridge(["export", str(version), str(out), f"--model-dir={model}"]) == 0
        publisher = Publisher(run.path, run.spec, LOG)
        assert publisher.publish_new() == list(range(STEPS + 1))
        assert (weights_folder(run.path) / f"v{STEPS}" / "probe.json").exists()
        assert versions_in(params_folder(run.path, run.spec)) == [STEPS]


@pytest.mark.nightly
@pytest.mark.parametrize("writable", [True, False])
def test_a_stop_signal_to_any_ends_all_also_where_one_cannot_save(writable, compiled, tmp_path):
    # given two processes that wait for the batch of step 1
    run = ready(tmp_path / "run", compiled, batches=1)
    states = state_folder(run.path, run.spec)
    with learners(run, heartbeat_s=600 if writable else 30) as processes:
        caught(trained(run, 1), "the first step", processes)
        if not writable:  # the first cannot make the folder of the full state
            states.mkdir(parents=True, exist_ok=True)
            (states / ".tmp-step_1").touch()
        # when the second is told to end, then both do
        processes[1].terminate()
        first, second = codes_of(processes)
    if writable:
        assert (first, second, state_steps(states)) == (0, 0, [1])
    else:
        assert first == EXIT_USER_ERROR and second != 0
        assert "cannot write a checkpoint" in log_of(run, 0).read_text()


@pytest.mark.nightly
def test_processes_that_do_not_share_checkpoints_are_told_so(compiled, tmp_path):
    # given two processes, each with a run directory of its own, and no folder of checkpoints
    run = ready(tmp_path / "run", compiled, batches=0)
    with learners(run, own_folder(run, tmp_path)) as processes:
        # then both end, and say what to set
        assert codes_of(processes) == [EXIT_USER_ERROR] * 2
    for index in (0, 1):
        assert "remedy: set checkpoints.dir" in log_of(run, index).read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("index", [0, 1])
def test_a_process_that_stays_alone_says_whom_it_waited_for(index, compiled, tmp_path):
    run = ready(tmp_path / "run", compiled, batches=0)
    command = [sys.executable, "-c", HOST, str(run.path), "2", "60"]
    with reserved_port() as port:
        environment = {**os.environ, **place_of(port, index)}
        alone = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert alone.returncode == EXIT_USER_ERROR
    assert f"process {index} of 2" in alone.stderr and f"127.0.0.1:{port}" in alone.stderr


def test_a_process_that_does_not_know_its_place_is_refused(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    monkeypatch.setenv("JAX_PROCESS_ID", "x")
    for coordinator, index, message in (
        ("localhost:1", None, "are given together"),
        (None, 1, "are given together"),
        ("localhost:1", 2, "process 2 of 2"),
        (None, None, "'x' is not a number"),
    ):
        place = joined(2, coordinator, index, LOG, join_s=1, heartbeat_s=1)
        with pytest.raises(UserError, match=message), place:
            pass


@pytest.mark.parametrize("asked", [0, 1])
def test_a_process_that_jax_gives_another_number_stops_both(monkeypatch, asked):
    """On TPUs JAX goes by the slice's numbers; nothing else does, so this stands for them."""
    monkeypatch.setattr(distributed, "_join", lambda *_: None)
    monkeypatch.setattr(distributed.jax, "process_index", lambda: 1 - asked)

    def gathered(mine: np.ndarray) -> np.ndarray:
        other = np.zeros_like(mine)
        name = f"{1 - asked} other".encode()
        other[: len(name)] = np.frombuffer(name, np.uint8)
        return np.stack([other, mine] if asked == 0 else [mine, other])

    monkeypatch.setattr(distributed.multihost_utils, "process_allgather", gathered)
    place = joined(2, "localhost:1", asked, LOG, join_s=1, heartbeat_s=1)
    with pytest.raises(UserError, match="process 1 of the learner is 0 for JAX, on"), place:
        pass


def test_devices_are_an_equal_share_of_each_process():
    assert len(mesh_devices(1, 2)) == 8
    with pytest.raises(UserError, match="needs 4 devices, 2 in each of 2 processes; one has 0"):
        mesh_devices(2, 4)
