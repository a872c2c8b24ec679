"""The loop: every step once, the same bits after a crash, and a stop where they would differ.

A replay elsewhere than a run began may differ: the difference is reported, the published bits stay.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bridge.conversion import export_checkpoint
from bridge.safetensors_io import read_headers, read_tensor
from learner_jax.checkpoint import state_steps
from learner_jax.distributed import Peers
from learner_jax.train import train
from learner_jax.versions import MadeOn, differences, same_bits
from runspec.core.errors import UserError
from runspec.core.process import RunStopped
from runspec.core.run_files import params_folder, state_folder, versions_in, weights_folder
from runspec.core.schema.load import dump_resolved
from tests.learner_jax.conftest import Run, tiny_spec, write_initial_model

pytestmark = pytest.mark.slow

LOG = logging.getLogger("test")
BATCH = "rollouts/step_{}/batch.json"


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
    (run.path / BATCH.format(3)).write_bytes(b"garbage")
    with pytest.raises(UserError, match="batch"):
        train_to_the_end(run)
    # An error that names its cause saves the state; a crash does not.
    shutil.rmtree(state_folder(run.path, run.spec) / "step_3")
    return run


def copied(run: Run, path: Path) -> Run:
    """The same run in another directory."""
    shutil.copytree(run.path, path, symlinks=True)
    run = copy.copy(run)
    run.path = path
    return run


def train_to_the_end(run: Run) -> None:
    train(run.path, LOG, threading.Event())


class StopAt(threading.Event):
    """Set once so many lines of metrics are there."""

    def __init__(self, run: Run, steps: int) -> None:
        super().__init__()
        self._path, self._steps = run.path / "metrics.jsonl", steps

    def is_set(self) -> bool:
        return self._path.exists() and len(self._path.read_text().splitlines()) >= self._steps


def weights(run: Run, version: int, out: Path) -> dict[str, np.ndarray]:
    """The weights of a version as the publisher would export them."""
    directory = out / f"{run.path.parent.name}-v{version}"
    export_checkpoint(
        params_folder(run.path, run.spec) / f"v{version}" / "params",
        directory,
        model_dir=run.path / "initial",
        dtype=run.spec.broadcast.dtype,
    )
    return tensors_in(directory)


def tensors_in(directory: Path) -> dict[str, np.ndarray]:
    return {name: read_tensor(info) for name, info in read_headers(directory).items()}


def assert_same_weights(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def lines(run: Run, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.path / f"{name}.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run trained without a break, that keeps one full state."""
    checkpoints = {"every": 2, "keep": 1}
    run = ready_run(tmp_path_factory.mktemp("straight") / "run", checkpoints=checkpoints)
    train_to_the_end(run)
    return run


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return broken_run(tmp_path_factory.mktemp("broken") / "run")


def other_kinds() -> dict[str, Any]:
    """Adapters whose bfloat16 masters have moments on the host."""
    spec = tiny_spec()
    lora = {"rank": 2, "alpha": 4.0, "targets": ["q", "v"]}
    return {
        "optimizer": spec.optimizer.model_dump() | {"offload": True},
        "learner": spec.learner.model_dump() | {"lora": lora, "master_dtype": "bfloat16"},
    }


def no_bits_needed() -> dict[str, Any]:
    """Nothing needs a version's bits after they are written: pi_old is mu, no KL."""
    changes = {"old_logprobs": "sampler", "kl": {"coef": 0.0}}
    return {"algorithm": tiny_spec().algorithm.model_dump() | changes}


@pytest.fixture(scope="module")
def broken_adapters(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return broken_run(tmp_path_factory.mktemp("broken_adapters") / "run", **other_kinds())


def test_every_step_makes_a_version_a_line_and_samples(straight, broken, tmp_path):
    # then versions 0 to 4 lie there, and states at every second step, of which one is kept
    assert versions_in(params_folder(straight.path, straight.spec)) == [0, 1, 2, 3, 4]
    assert state_steps(state_folder(straight.path, straight.spec)) == [4]
    assert state_steps(state_folder(broken.path, broken.spec)) == [2]
    # and version 0 is the initial model bit for bit, and training moved its weights
    first, second = (weights(straight, version, tmp_path) for version in (0, 1))
    assert_same_weights(first, tensors_in(straight.path / "initial"))
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
    # and rollouts are gone that no kept state can need: async_level is 2
    steps = [straight.path / "rollouts" / f"step_{step}" for step in range(4)]
    assert [len(list(step.iterdir())) for step in steps] == [1, 1, 5, 5]
    # and once it is finished, it trains nothing more
    train_to_the_end(straight)
    assert lines(straight, "metrics") == metrics


def test_a_crash_changes_no_bit_and_no_line(straight, broken, tmp_path):
    # given the same run, that died at step 3, a step after its last state
    run = copied(broken, tmp_path / "run")
    assert versions_in(params_folder(run.path, run.spec)) == [0, 1, 2, 3]
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


def test_settings_change_at_their_step_wherever_the_run_was_broken_off(straight, broken, tmp_path):
    # given a run whose settings change at step 3, with all its steps behind each other
    change = {"name": "calmer", "step": 3, "lr": 1e-4, "warmup_updates": 4, "kl_coef": 0.5}
    changes = [change | {"eps_low": 0.01, "eps_high": 0.01, "delta": 1.5}]
    whole = ready_run(tmp_path / "whole" / "run", changes=changes)
    train_to_the_end(whole)
    # when one that died a step after its last state takes the change over
    run = copied(broken, tmp_path / "run")
    spec = tiny_spec(changes=changes, checkpoints={"every": 2})
    (run.path / "spec.json").write_bytes(dump_resolved(spec))
    run.add_step(3, version=2)
    train_to_the_end(run)
    # then step 2 is trained again as it was, step 3 by the new settings
    for version, equal in ((3, True), (4, False)):
        runs = (straight, whole, run)
        before, expected, found = (weights(each, version, tmp_path) for each in runs)
        assert_same_weights(found, expected)
        assert all((before[name] == found[name]).all() for name in before) == equal
    # and so they are when the state after the change is lost: a replay that differs would stop
    shutil.rmtree(state_folder(run.path, run.spec) / "step_4")
    train_to_the_end(run)
    assert state_steps(state_folder(run.path, run.spec))[-1] == 4


def test_a_crash_changes_no_bit_of_other_kinds_of_state(broken_adapters, tmp_path):
    # given the same run, once without a break
    straight = ready_run(tmp_path / "a" / "run", **other_kinds())
    train_to_the_end(straight)
    # when the one that died goes on, then it ends with the same bits
    run = copied(broken_adapters, tmp_path / "b")
    run.add_step(3, version=2)
    train_to_the_end(run)
    assert_same_weights(weights(run, 4, tmp_path), weights(straight, 4, tmp_path))


KILLED = """
import importlib, os, signal, sys
from runspec.role import main

folder, module, name, times = sys.argv[1:]
module, times = importlib.import_module(module), int(times)
function, calls = getattr(module, name), []

def counted(*arguments, **options):
    calls.append(name)
    if len(calls) == times:
        os.kill(os.getpid(), signal.SIGKILL)
    return function(*arguments, **options)

setattr(module, name, counted)
main(["learner", folder])
"""
"""A learner that is killed when it calls a function of a module for the nth time."""


@pytest.mark.parametrize(
    ("call", "states"),
    [
        # while its second full state is written: arrays are there, their digests are not
        (("runspec.core.run_files", "file_digests", "2"), [2]),
        # in the middle of a step; and between a full state and the version after it
        pytest.param(("learner_jax.training", "step_numbers", "2"), [], marks=pytest.mark.nightly),
        pytest.param(("learner_jax.versions", "save_params", "4"), [2], marks=pytest.mark.nightly),
    ],
    ids=["in a save", "in a step", "before a version"],
)
def test_killed_it_ends_with_the_same_bits(straight, tmp_path, compiled, call, states):
    # given the same batches, and a learner of its own process that is killed
    learner = straight.spec.learner.model_dump() | {"compile_cache": str(compiled)}
    run = ready_run(tmp_path / "run", learner=learner)
    command = [sys.executable, "-c", KILLED, str(run.path), *call]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert state_steps(state_folder(run.path, run.spec)) == states
    # when it is started again, then it has the parameters of the run that nobody killed
    train_to_the_end(run)
    assert_same_weights(weights(run, 4, tmp_path), weights(straight, 4, tmp_path))
    # and every step its line, once, and nothing is left of what was never finished
    losses = [
        [(line["step"], line["loss"]) for line in lines(each, "metrics")]
        for each in (run, straight)
    ]
    assert losses[0] == losses[1]
    found = [path.name for path in state_folder(run.path, run.spec).iterdir()]
    assert sorted(found) == ["step_2", "step_4"]


def elsewhere(run: Run) -> None:
    """Makes a run's versions those of another machine."""
    path = run.path / "checkpoints" / "fingerprints.jsonl"
    record = json.loads(path.read_bytes())
    record["fingerprint"]["machine"] = "another"
    path.write_text(json.dumps(record) + "\n")


def publish_other_bits(run: Run, version: int) -> Path:
    """A version as published: what the one before was, so that it differs from any replay."""
    params, published = params_folder(run.path, run.spec), weights_folder(run.path) / f"v{version}"
    source, model = params / f"v{version - 1}" / "params", run.path / "initial"
    export_checkpoint(source, published, model_dir=model, dtype="float32")
    shutil.rmtree(params / f"v{version}")
    return published


def test_a_replay_that_differs_stops_the_run_here_and_is_reported_elsewhere(
    broken, tmp_path, caplog
):
    # given a run that crashed after version 3 was published with bits that no replay here gives
    run = copied(broken, tmp_path / "run")
    published = publish_other_bits(run, 3)
    before = tensors_in(published)
    # when the same program goes on, then it stops, and a tensor is named
    with pytest.raises(RunStopped, match=r"version 3.* differs from .* in \d+ of .* first is mo"):
        train_to_the_end(run)
    # when another one does
    elsewhere(run)
    run.add_step(3, version=2)
    with caplog.at_level(logging.INFO):
        train_to_the_end(run)
    # then the log and the next line of metrics say by how much the replay differs
    assert "version 3, trained again, differs" in caplog.text
    line = lines(run, "metrics")[-1]
    assert line["step"] == 3 and 1e-5 < line["replay_difference"] < 0.1
    # and the published bits are what they were
    assert_same_weights(before, tensors_in(published))


def test_a_state_of_a_differing_replay_says_so_and_a_run_goes_on_from_it(broken, tmp_path):
    # given a run that went on elsewhere, and found a damaged batch after the replay
    run = copied(broken, tmp_path / "run")
    publish_other_bits(run, 3)
    elsewhere(run)
    with pytest.raises(UserError, match="batch"):
        train_to_the_end(run)
    state = state_folder(run.path, run.spec) / "step_3" / "state.json"
    assert json.loads(state.read_bytes())["published"] is False
    # when it goes on from that state, then nothing stops it
    run.add_step(3, version=2)
    train_to_the_end(run)
    assert [line["step"] for line in lines(run, "metrics")] == [0, 1, 2, 3]


def test_adapters_of_a_state_may_merge_into_other_bits_elsewhere(broken_adapters, tmp_path):
    # given a LoRA run whose full state gives version 2 other bits here than it was published with
    run = copied(broken_adapters, tmp_path / "run")
    publish_other_bits(run, 2)
    # when it goes on on the program that wrote the state, then it stops
    with pytest.raises(RunStopped, match="version 2, trained again, differs"):
        train_to_the_end(run)
    # when it goes on elsewhere, then it trains to the end
    elsewhere(run)
    run.add_step(3, version=2)
    train_to_the_end(run)
    assert lines(run, "metrics")[-1]["replay_difference"] > 0


def test_told_to_stop_or_given_a_file_that_cannot_be_decoded_it_saves_where_it_is(tmp_path):
    # given a run that is told to stop after its first step
    run = ready_run(tmp_path / "run", batches=range(1), **no_bits_needed())
    train(run.path, LOG, StopAt(run, 1))
    assert state_steps(state_folder(run.path, run.spec)) == [1]
    # given that its second step has a submission that is no table, accepted and signed
    run.accept(1, run.add_step(1, version=0), b"\xff" * 1000)
    # then that step is not trained without it
    with pytest.raises(UserError, match="of step 1 was accepted by validator"):
        train_to_the_end(run)
    assert versions_in(params_folder(run.path, run.spec)) == [0, 1]
    assert state_steps(state_folder(run.path, run.spec)) == [1]


def cut_short(run: Run) -> None:
    files = sorted((state_folder(run.path, run.spec) / "step_4").rglob("d/*"))
    victim = next(path for path in files if path.is_file())
    victim.write_bytes(victim.read_bytes()[:-1])


def another_seed(run: Run) -> None:
    spec = run.spec.model_copy(update={"seed": run.spec.seed + 1})
    (run.path / "spec.json").write_bytes(dump_resolved(spec))


def another_model(run: Run) -> None:
    shutil.rmtree(run.path / "initial")
    write_initial_model(run, seed=1)


def another_batch(run: Run) -> None:
    shutil.rmtree(run.path / "rollouts" / "step_3")
    run.add_batch(3, run.add_step(3, version=2)[1:])


@pytest.mark.parametrize(
    ("damage", "message", "place"),
    [
        (cut_short, "unreadable checkpoint", "step_4"),
        (another_seed, "a state of another seed: 7, not 8", "step_4"),
        (another_model, "a state of another starting model", "step_4"),
        (another_batch, "not the batch manifest that was trained", BATCH.format(3)),
        (
            lambda run: (run.path / "initial" / "model.safetensors").unlink(),
            "no safetensors files",
            "initial",
        ),
    ],
)
def test_a_full_state_that_is_not_this_runs_is_named_not_skipped(
    straight, tmp_path, damage, message, place
):
    run = copied(straight, tmp_path / "run")
    damage(run)
    with pytest.raises(UserError, match=message) as caught:
        train_to_the_end(run)
    assert place in caught.value.place and caught.value.remedy


def test_a_version_is_of_who_wrote_it_not_of_who_was_killed_before(tmp_path):
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


def test_a_fingerprint_names_what_changed_and_a_gpu_must_be_deterministic():
    cpu = {"mesh": {"data": 2}, "threads": 4, "exact": True}
    assert same_bits(cpu, dict(cpu))
    assert not same_bits(cpu, {**cpu, "threads": 8})
    assert differences(cpu, {**cpu, "threads": 8}) == ["threads: 4 then, 8 now"]
    gpu = {"platform": "gpu", "exact": False}
    assert not same_bits(gpu, dict(gpu)) and differences(gpu, dict(gpu)) == []
