"""The learner and the publisher as the supervisor runs them: processes, killed and restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from broadcast.store import newest_version
from learner_jax.checkpoint import state_steps
from learner_jax.layout import state_folder, versions_in, weights_folder
from learner_jax.metrics import JsonLines
from runspec.core.process import EXIT_USER_ERROR
from tests.learner_jax.conftest import Run, tiny_spec, write_initial_model
from tests.waiting import eventually, one_ended

DEADLINE_S = 120.0


def start(run: Run, command: str) -> subprocess.Popen[bytes]:
    log = (run.path / f"{command}.log").open("ab")
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    with log:
        return subprocess.Popen(
            [sys.executable, "-m", "learner_jax", command, str(run.path)],
            env=environment,
            stdout=log,
            stderr=log,
        )


def test_help_is_quick_and_a_missing_run_is_an_error_for_people(tmp_path: Path) -> None:
    module = [sys.executable, "-m", "learner_jax"]
    text = subprocess.run([*module, "--help"], capture_output=True, check=True, text=True).stdout
    assert all(command in text for command in ("warm-start", "train", "publish"))
    gone = subprocess.run([*module, "publish", str(tmp_path)], capture_output=True, text=True)
    assert gone.returncode == EXIT_USER_ERROR
    assert "spec.json" in gone.stderr and "remedy" in gone.stderr


@pytest.mark.slow
def test_killed_learner_and_publisher_finish_the_run_with_the_same_weights(tmp_path: Path) -> None:
    # given two runs of the same batches, one of which still waits for the last
    straight, broken = Run(tmp_path / "a", tiny_spec()), Run(tmp_path / "b", tiny_spec())
    for run, batches in ((straight, 4), (broken, 3)):
        write_initial_model(run)
        for step in range(batches):
            run.add_step(step, version=max(0, step - 1))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        publishers = {run.path: start(run, "publish") for run in (straight, broken)}
        processes += publishers.values()
        learner = start(straight, "train")
        processes.append(learner)
        assert learner.wait(DEADLINE_S) == 0
        # when the other is killed after step 2, a step past its last full state
        victim = start(broken, "train")
        processes.append(victim)
        store = broken.path / "store" / "origin"
        eventually(
            lambda: newest_version(store, run="tiny") == 3,
            "version 3",
            deadline_s=DEADLINE_S,
            hopeless=lambda: one_ended([victim]),
        )
        for process in (victim, publishers[broken.path]):
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert state_steps(state_folder(broken.path, broken.spec)) == [2]
        # and both its roles are started again, the last batch there now
        broken.add_step(3, version=2)
        publishers[broken.path] = start(broken, "publish")
        again = start(broken, "train")
        processes += [again, publishers[broken.path]]
        assert again.wait(DEADLINE_S) == 0
        # then all is published, with the bits of the run that nobody killed
        for run in (straight, broken):
            origin = run.path / "store" / "origin"
            eventually(
                lambda origin=origin: newest_version(origin, run="tiny") == 4,
                "version 4",
                deadline_s=DEADLINE_S,
                hopeless=lambda run=run: one_ended([publishers[run.path]]),
            )
            assert versions_in(weights_folder(run.path))[-1] == 4
            assert JsonLines(run.path / "metrics.jsonl").last_step == 3
        files = [run.path / "weights/v4/model.safetensors" for run in (straight, broken)]
        assert files[0].read_bytes() == files[1].read_bytes()
        assert "has the published bits" in (broken.path / "train.log").read_text()
        # and the publishers end when they are asked to
        for publisher in publishers.values():
            publisher.terminate()
            assert publisher.wait(20) == 0
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
