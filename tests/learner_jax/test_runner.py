"""The loop: every step once, the same bits after a crash, and a stop where they would differ."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.conversion import export_checkpoint
from bridge.safetensors_io import read_headers, read_tensor
from learner_jax.checkpoint import state_steps
from learner_jax.runner import train
from runspec.core.errors import UserError
from runspec.core.process import RunStopped
from runspec.core.run_files import params_folder, state_folder, versions_in
from tests.learner_jax.conftest import Run, tiny_spec, write_initial_model

LOG = logging.getLogger("test")


def ready_run(path: Path, *, batches: range = range(4), **changes: Any) -> Run:
    """A run with its initial model and `batches`, each sampled a version earlier."""
    run = Run(path, tiny_spec(**changes))
    write_initial_model(run)
    for step in batches:
        run.add_step(step, version=max(0, step - 1))
    return run


def broken_run(path: Path, **changes: Any) -> Run:
    """A run that died at step 3, a step after its last full state."""
    run = ready_run(path, batches=range(3), **changes)
    (run.path / "rollouts" / "step_3").mkdir()
    (run.path / "rollouts" / "step_3" / "batch.json").write_bytes(b"garbage")
    with pytest.raises(UserError, match="batch"):
        train_to_the_end(run)
    # An error that names its cause saves the state; a crash does not.
    shutil.rmtree(state_folder(run.path, run.spec) / "step_3")
    return run


def train_to_the_end(run: Run) -> None:
    train(run.path, LOG, threading.Event())


def weights(run: Run, version: int, out: Path) -> dict[str, np.ndarray]:
    """The weights of a version as the publisher would export them."""
    directory = out / f"{run.path.parent.name}-v{version}"
    export_checkpoint(
        params_folder(run.path, run.spec) / f"v{version}" / "params",
        directory,
        model_dir=run.path / "initial",
        dtype=run.spec.broadcast.dtype,
    )
    return {name: read_tensor(info) for name, info in read_headers(directory).items()}


def assert_same_weights(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def lines(run: Run, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run trained without a break."""
    run = ready_run(tmp_path_factory.mktemp("straight") / "run")
    train_to_the_end(run)
    return run


def test_every_step_makes_a_version_a_line_and_samples(straight: Run, tmp_path: Path) -> None:
    # then versions 0 to 4 lie there, states at every second step, and the last
    assert versions_in(params_folder(straight.path, straight.spec)) == [0, 1, 2, 3, 4]
    assert state_steps(state_folder(straight.path, straight.spec)) == [2, 4]
    # and training moved the weights of every version
    first, second = (weights(straight, version, tmp_path) for version in (0, 1))
    assert any((first[name] != second[name]).any() for name in first)
    # and each step has one line of metrics, with the lag, and two samples that read as text
    metrics = lines(straight, "metrics")
    assert [line["step"] for line in metrics] == [0, 1, 2, 3]
    assert [line["lag_mean"] for line in metrics] == [0.0, 1.0, 1.0, 1.0]
    assert all(line["trained_rollouts"] == 16 and line["grad_norm"] > 0 for line in metrics)
    assert metrics[2]["task_reward"] == 0.5 and metrics[2]["kl"] > 0
    assert all(0 < line["learner_busy_fraction"] <= 1 for line in metrics)
    samples = lines(straight, "samples")
    assert [line["step"] for line in samples] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert samples[0]["output"].startswith("w")


def test_version_0_is_the_initial_model_bit_for_bit(straight: Run, tmp_path: Path) -> None:
    initial = {
        name: read_tensor(info) for name, info in read_headers(straight.path / "initial").items()
    }
    assert_same_weights(weights(straight, 0, tmp_path), initial)


def test_a_crash_changes_no_bit_and_no_line(straight: Run, tmp_path: Path) -> None:
    # given the same run, that dies at step 3, a step after its last state
    run = broken_run(tmp_path / "run")
    assert versions_in(params_folder(run.path, run.spec)) == [0, 1, 2, 3]
    assert state_steps(state_folder(run.path, run.spec)) == [2]
    written = (params_folder(run.path, run.spec) / "v3").stat().st_mtime_ns
    # when the batch is there and the learner starts again
    run.add_step(3, version=2)
    train_to_the_end(run)
    # then version 3 was trained again and not written again, and version 4 has the same bits
    assert (params_folder(run.path, run.spec) / "v3").stat().st_mtime_ns == written
    assert_same_weights(weights(run, 4, tmp_path), weights(straight, 4, tmp_path))
    # and no step has its lines twice
    assert [line["step"] for line in lines(run, "metrics")] == [0, 1, 2, 3]
    for ours, theirs in zip(lines(run, "metrics"), lines(straight, "metrics"), strict=True):
        assert ours["loss"] == theirs["loss"] and ours["grad_norm"] == theirs["grad_norm"]


def moments_on_the_host() -> dict[str, Any]:
    """And nothing that needs a version's bits after they are written: pi_old is mu, no KL."""
    spec = tiny_spec()
    algorithm = {**spec.algorithm.model_dump(), "old_logprobs": "sampler", "kl": {"coef": 0.0}}
    optimizer = {**spec.optimizer.model_dump(), "offload": True}
    return {"algorithm": algorithm, "optimizer": optimizer}


def adapters() -> dict[str, Any]:
    lora = {"rank": 2, "alpha": 4.0, "targets": ["q", "v"]}
    return {"learner": {**tiny_spec().learner.model_dump(), "lora": lora}}


def bfloat16_masters() -> dict[str, Any]:
    return {"learner": {**tiny_spec().learner.model_dump(), "master_dtype": "bfloat16"}}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [moments_on_the_host, adapters, bfloat16_masters])
def test_a_crash_changes_no_bit_of_other_kinds_of_state(
    tmp_path: Path, changes: Callable[[], dict[str, Any]]
) -> None:
    # given the same run, once without a break
    straight, run = ready_run(tmp_path / "a", **changes()), broken_run(tmp_path / "b", **changes())
    train_to_the_end(straight)
    # when the one that died goes on, then it ends with the same bits
    run.add_step(3, version=2)
    train_to_the_end(run)
    assert_same_weights(weights(run, 4, tmp_path / "x"), weights(straight, 4, tmp_path / "y"))


def test_a_replay_that_differs_from_the_published_bits_stops_the_run(tmp_path: Path) -> None:
    # given a run whose version 3 was published, then a crash before the next full state
    run = broken_run(tmp_path / "run")
    published = run.path / "weights" / "v3"
    export_checkpoint(
        params_folder(run.path, run.spec) / "v3" / "params",
        published,
        model_dir=run.path / "initial",
        dtype="float32",
    )
    # and the published digests are another training's
    records = json.loads((published / "tensors.json").read_bytes())
    records["tensors"]["model.layers.1.mlp.up_proj.weight"]["blake3"] = "00" * 32
    (published / "tensors.json").write_text(json.dumps(records))
    # when the learner replays step 2, then the run stops and the tensor is named
    with pytest.raises(RunStopped, match=r"1 of .* first is model\.layers\.1\.mlp\.up_proj"):
        train_to_the_end(run)


def test_told_to_stop_it_saves_where_it_is(tmp_path: Path) -> None:
    # given a run that waits for the batch of step 1
    run = ready_run(tmp_path / "run", batches=range(1))
    stop = threading.Event()
    learner = threading.Thread(target=train, args=(run.path, LOG, stop))
    learner.start()
    metrics = run.path / "metrics.jsonl"
    while learner.is_alive() and not (metrics.exists() and metrics.read_bytes()):
        stop.wait(0.01)
    # when it is told to stop, then it saves step 1 and ends
    stop.set()
    learner.join(timeout=60)
    assert not learner.is_alive()
    assert state_steps(state_folder(run.path, run.spec)) == [1]


def test_a_step_whose_file_cannot_be_decoded_is_not_trained_without_it(tmp_path: Path) -> None:
    # given a run whose second step has a submission that is no table, accepted and signed
    run = ready_run(tmp_path / "run", batches=range(1))
    run.accept(1, run.add_step(1, version=0), b"\xff" * 1000)
    # when the learner trains it
    with pytest.raises(UserError, match="of step 1 was accepted by validator"):
        train_to_the_end(run)
    # then the first step is trained and saved, and no more
    assert versions_in(params_folder(run.path, run.spec)) == [0, 1]
    assert state_steps(state_folder(run.path, run.spec)) == [1]


def test_a_finished_run_trains_nothing(straight: Run) -> None:
    before = (straight.path / "metrics.jsonl").read_bytes()
    train_to_the_end(straight)
    assert (straight.path / "metrics.jsonl").read_bytes() == before


def test_old_rollouts_go_once_every_kept_state_has_passed_them(tmp_path: Path) -> None:
    spec = {"steps": 6, "checkpoints": {"every": 1, "keep": 1}}
    run = ready_run(tmp_path / "run", batches=range(6), **spec)
    train_to_the_end(run)
    # state 6 is the only one kept, async_level is 2: what steps 0 to 3 leased cannot be needed
    left = {
        step: len(list((run.path / "rollouts" / f"step_{step}").iterdir())) for step in range(6)
    }
    assert left == {0: 1, 1: 1, 2: 1, 3: 1, 4: 5, 5: 5}


def test_a_corrupt_full_state_is_named_not_skipped(tmp_path: Path) -> None:
    run = ready_run(tmp_path / "run", batches=range(2), steps=2)
    train_to_the_end(run)
    state = state_folder(run.path, run.spec) / "step_2"
    victim = next(path for path in sorted(state.rglob("d/*")) if path.is_file())
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(UserError, match="unreadable checkpoint") as caught:
        train_to_the_end(run)
    assert "step_2" in caught.value.place
