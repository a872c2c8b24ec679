"""Commands of the learner as processes: help, errors for people, a publisher that is killed."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from bridge.safetensors_io import read_headers, read_tensor
from broadcast.store import newest_version
from learner_jax.runner import train
from runspec.core.process import EXIT_USER_ERROR
from runspec.core.run_files import weights_folder
from tests.learner_jax.conftest import Run, tiny_spec, write_initial_model
from tests.learner_jax.test_runner import assert_same_weights, weights
from tests.waiting import eventually, one_ended

DEADLINE_S = 120.0


def start(run: Run) -> subprocess.Popen[bytes]:
    """A publisher."""
    command = [sys.executable, "-m", "bridge", "publish", str(run.path)]
    with (run.path / "publish.log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def test_help_is_quick_and_a_missing_run_is_an_error_for_people(tmp_path: Path) -> None:
    module = [sys.executable, "-m"]
    for package, commands in (("learner_jax", ("warm-start", "train")), ("bridge", ("publish",))):
        help_of = [*module, package, "--help"]
        text = subprocess.run(help_of, capture_output=True, check=True, text=True).stdout
        assert all(command in text for command in commands)
    publish = [*module, "bridge", "publish", str(tmp_path)]
    gone = subprocess.run(publish, capture_output=True, text=True)
    assert gone.returncode == EXIT_USER_ERROR
    assert "spec.json" in gone.stderr and "remedy" in gone.stderr


@pytest.mark.slow
def test_a_killed_publisher_publishes_the_rest_with_the_same_bits(tmp_path: Path) -> None:
    # given a learner that waits for the last batch, and a publisher process beside it
    run = Run(tmp_path / "run", tiny_spec())
    write_initial_model(run)
    for step in range(3):
        run.add_step(step, version=max(0, step - 1))
    store = run.path / "store" / "origin"
    first = start(run)
    stop = threading.Event()
    learner = threading.Thread(target=train, args=(run.path, logging.getLogger("test"), stop))
    learner.start()
    try:
        eventually(
            lambda: (newest_version(store, run="tiny") or 0) >= 1,
            "a version",
            deadline_s=DEADLINE_S,
            hopeless=lambda: one_ended([first]),
        )
        # when the publisher is killed, wherever it is, and the last version is trained
        first.kill()
        run.add_step(3, version=2)
        learner.join(DEADLINE_S)
        assert not learner.is_alive()
    finally:
        stop.set()
        first.kill()
        first.wait()
        learner.join(DEADLINE_S)
    second = start(run)
    try:
        # then the next one publishes what is left
        eventually(
            lambda: newest_version(store, run="tiny") == 4,
            "version 4",
            deadline_s=DEADLINE_S,
            hopeless=lambda: one_ended([second]),
        )
        # and ends when it is asked to
        second.terminate()
        assert second.wait(DEADLINE_S) == 0
    finally:
        second.kill()
        second.wait()
    # and the version has the bits of the learner's parameters
    published = {
        name: read_tensor(info)
        for name, info in read_headers(weights_folder(run.path) / "v4").items()
    }
    assert_same_weights(weights(run, 4, tmp_path), published)
