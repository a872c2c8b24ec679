"""A replay elsewhere than a run began: the difference is told, the published bits stay."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest

from bridge.conversion import export_checkpoint
from bridge.safetensors_io import read_headers, read_tensor
from learner_jax.distributed import Peers
from learner_jax.fingerprint import differences, same_bits
from learner_jax.versions import MadeOn
from runspec.core.errors import UserError
from runspec.core.process import RunStopped
from runspec.core.run_files import params_folder, state_folder, weights_folder
from tests.learner_jax.conftest import Run
from tests.learner_jax.test_runner import (
    adapters,
    assert_same_weights,
    broken_run,
    lines,
    train_to_the_end,
    weights,
)

PUBLISHED = 3


def elsewhere(run: Run) -> None:
    """Makes a run's versions those of another machine."""
    path = run.path / "checkpoints" / "fingerprints.jsonl"
    record = json.loads(path.read_bytes())
    record["fingerprint"]["machine"] = "another"
    path.write_text(json.dumps(record) + "\n")


def publish_other_bits(run: Run, version: int = PUBLISHED) -> None:
    """A version as published: what the one before was, so that it differs from any replay."""
    export_checkpoint(
        params_folder(run.path, run.spec) / f"v{version - 1}" / "params",
        weights_folder(run.path) / f"v{version}",
        model_dir=run.path / "initial",
        dtype="float32",
    )
    shutil.rmtree(params_folder(run.path, run.spec) / f"v{version}")


@pytest.mark.slow
def test_a_replay_that_differs_stops_the_run_here_and_is_reported_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    # given a run that crashed after version 3 was published with bits that no replay here gives
    run = broken_run(tmp_path / "run")
    publish_other_bits(run)
    before = weights(run, PUBLISHED - 1, tmp_path)
    # when the same program goes on, then it stops
    with pytest.raises(RunStopped, match="differs from the published one"):
        train_to_the_end(run)
    # when another one does
    elsewhere(run)
    run.add_step(PUBLISHED, version=2)
    with caplog.at_level(logging.INFO):
        train_to_the_end(run)
    # then the log and the next line of metrics say by how much the replay differs
    assert f"version {PUBLISHED}, trained again, differs" in caplog.text
    line = lines(run, "metrics")[-1]
    assert line["step"] == PUBLISHED and 1e-5 < line["replay_difference"] < 0.1
    # and the published bits are what they were
    published = read_headers(weights_folder(run.path) / f"v{PUBLISHED}")
    assert_same_weights(before, {name: read_tensor(info) for name, info in published.items()})


@pytest.mark.slow
def test_a_state_of_a_differing_replay_says_so_and_a_run_goes_on_from_it(tmp_path: Path) -> None:
    # given a run that went on elsewhere, and was told to end after the replay
    run = broken_run(tmp_path / "run")
    publish_other_bits(run)
    elsewhere(run)
    with pytest.raises(UserError, match="batch"):  # that of step 3 is still damaged
        train_to_the_end(run)
    state = state_folder(run.path, run.spec) / f"step_{PUBLISHED}" / "state.json"
    assert json.loads(state.read_bytes())["published"] is False
    # when it goes on from that state, then nothing stops it
    run.add_step(PUBLISHED, version=2)
    train_to_the_end(run)
    assert [line["step"] for line in lines(run, "metrics")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_adapters_of_a_state_may_merge_into_other_bits_elsewhere(tmp_path: Path) -> None:
    # given a LoRA run whose full state gives version 2 other bits here than it was published with
    run = broken_run(tmp_path / "run", **adapters())
    publish_other_bits(run, 2)
    # when it goes on on the program that wrote the state, then it stops
    with pytest.raises(RunStopped, match="version 2, trained again, differs"):
        train_to_the_end(run)
    # when it goes on elsewhere, then it trains to the end
    elsewhere(run)
    run.add_step(PUBLISHED, version=2)
    train_to_the_end(run)
    assert lines(run, "metrics")[-1]["replay_difference"] > 0


def test_a_version_is_of_who_wrote_it_not_of_who_was_killed_before(tmp_path: Path) -> None:
    path = tmp_path / "fingerprints.jsonl"
    here, there = {"machine": "here", "exact": True}, {"machine": "there", "exact": True}
    # given version 5, begun on one program, whose process was killed before it was written
    MadeOn(path, there, Peers()).note(5)
    # when another program writes it, and the one after
    written = MadeOn(path, here, Peers())
    written.note(5)
    written.note(6)
    # then both must have the same bits there, and need not elsewhere
    for version in (5, 6):
        assert MadeOn(path, here, Peers()).same(version)
        assert not MadeOn(path, there, Peers()).same(version)


def test_a_fingerprint_names_what_changed_and_a_gpu_must_be_deterministic() -> None:
    cpu = {"mesh": {"data": 2}, "threads": 4, "exact": True}
    assert same_bits(cpu, dict(cpu))
    assert not same_bits(cpu, {**cpu, "threads": 8})
    assert differences(cpu, {**cpu, "threads": 8}) == ["threads: 4 then, 8 now"]
    gpu = {"platform": "gpu", "exact": False}
    assert not same_bits(gpu, dict(gpu)) and differences(gpu, dict(gpu)) == []
