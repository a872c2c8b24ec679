"""Steps trained again: an honest run's give its bits; what a learner did otherwise is found."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from broadcast.manifest import Chunk, ObjectInfo, WeightsManifest, sign_manifest
from learner_jax import checkpoint
from learner_jax.__main__ import main
from learner_jax.distributed import Peers
from learner_jax.replay import intervals, replay
from learner_jax.step import TrainState
from learner_jax.train import open_run
from runspec.core.errors import UserError
from runspec.core.run_files import published_manifest, state_folder, step_folder
from runspec.core.schema.load import dump_resolved
from tests.learner_jax import test_document_runs as documents
from tests.learner_jax.conftest import Run, tiny_spec
from tests.learner_jax.test_runner import copied, ready_run, train_to_the_end

pytestmark = pytest.mark.slow

LOG = logging.getLogger("test")
KEPT: dict[str, Any] = {"checkpoints": {"every": 2, "keep": 9}, "storage": {"rollouts": 9}}


def kept_run(path: Path, **changes: Any) -> Run:
    run = ready_run(path, **KEPT, **changes)
    train_to_the_end(run)
    return run


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return kept_run(tmp_path_factory.mktemp("honest") / "runs" / "run")


def everything_in(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_honest_interval_has_equal_bits_and_the_run_is_left_as_it_was(
    honest: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything_in(honest.path)
    # when all that is kept is replayed, by the command
    assert main(["replay", str(honest.path), "0-4"]) == 0
    # then every interval is equal, and nothing was written
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "steps 0 to 1: equal, every bit of the state after them",
        "steps 2 to 3: equal, every bit of the state after them",
    ]
    assert everything_in(honest.path) == before


def test_steps_of_documents_are_replayed_too(tmp_path: Path) -> None:
    files = documents.make_files(tmp_path)
    run = documents.ready_run(tmp_path / "runs" / "run", files)
    train_to_the_end(run)
    kept = checkpoint.state_steps(state_folder(run.path, run.spec))
    found = replay(run.path, *intervals(run.path, f"{kept[-1] - 1}")[0], LOG)
    assert (found.last, found.outcome) == (kept[-1], "equal")


Change = Callable[[TrainState], TrainState]


def alter_state(run: Run, step: int, change: Change) -> None:
    """Rewrite a full state as a learner would that had trained something else."""
    states = state_folder(run.path, run.spec)
    _, programs = open_run(run.path, Peers(), None, LOG)
    info = checkpoint.check_state(states, step)
    state = checkpoint.load_state(states, step, programs.abstract_state)
    shutil.rmtree(states / f"step_{step}")
    checkpoint.save_state(states, info, change(state), keep=9)()


def scaled(tree: Any, by: float) -> Any:
    return jax.tree.map(lambda leaf: (leaf * by).astype(leaf.dtype), tree)


ALTERED: dict[str, Change] = {
    "weights": lambda state: replace(state, params=scaled(state.params, 1 + 2**-20)),
    "moments": lambda state: replace(state, optimizer=scaled(state.optimizer, 2)),
}


@pytest.mark.parametrize(("what", "step"), [("weights", 4), ("weights", 2), ("moments", 4)])
def test_a_state_that_was_altered_is_refuted(
    what: str, step: int, honest: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given an altered state at the end of an interval, or at its beginning
    run = copied(honest, tmp_path / "runs" / "run")
    alter_state(run, step, ALTERED[what])
    # then the command says that the interval is not what the records give
    assert main(["replay", str(run.path), "3"]) == 1
    assert "steps 2 to 3: NOT what the records give" in capsys.readouterr().out


def test_what_the_learner_trained_otherwise_is_refuted(honest: Run, tmp_path: Path) -> None:
    # given a learner whose rate was one percent higher than the spec's
    run = kept_run(tmp_path / "runs" / "run", optimizer={"lr": 1.01e-3})
    spec = run.spec.model_copy(update={"optimizer": replace_rate(run, 1e-3)})
    (run.path / "spec.json").write_bytes(dump_resolved(spec))
    # then it is found by its bits, and it is said by how much its updates are larger
    found = replay(run.path, 2, 4, LOG)
    assert found.exact and found.outcome == "refuted"
    assert found.slope == pytest.approx(1.01, rel=1e-3)
    # and also where another program trained, whose bits may differ
    of_another_program(run)
    found = replay(run.path, 2, 4, LOG)
    assert not found.exact and found.outcome == "refuted" and found.far > 10 * found.noise


def replace_rate(run: Run, rate: float) -> Any:
    return run.spec.optimizer.model_copy(update={"lr": rate})


def of_another_program(run: Run) -> None:
    """What a run says that was trained on other processors."""
    made_on = run.path / "checkpoints" / "fingerprints.jsonl"
    line = json.loads(made_on.read_text().splitlines()[0])
    line["fingerprint"]["machine"] = "another"
    made_on.write_text(json.dumps(line) + "\n")


def test_another_program_has_to_be_as_near_as_rounding_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a run that was trained on another mesh than the one that it says
    one = {**tiny_spec().learner.model_dump(), "mesh": {"fsdp": 1}}
    run = kept_run(tmp_path / "runs" / "run", learner=one)
    (run.path / "spec.json").write_bytes(dump_resolved(tiny_spec(**KEPT)))
    # then its updates differ by rounding alone, and the word is not "equal"
    assert main(["replay", str(run.path), "0-4", "--json"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["outcome"] for each in said] == ["consistent", "consistent"]
    assert "'fsdp': 1, 'tensor': 1} then" in said[0]["line"]
    # when one tensor of the state is altered a little, it is found all the same
    alter_state(run, 4, lambda state: replace(state, params=nudged(state.params)))
    found = replay(run.path, 2, 4, LOG)
    assert (found.differing, found.outcome) == (["params/embed"], "refuted")
    # and altered moments, which would bend the next steps, and what is no number
    for name, change in {"optimizer": ALTERED["moments"], "params": not_a_number}.items():
        alter_state(run, 4, change)
        found = replay(run.path, 2, 4, LOG)
        assert found.outcome == "refuted" and any(n.startswith(name) for n in found.differing)


def not_a_number(state: TrainState) -> TrainState:
    return replace(state, params=scaled(state.params, float("nan")))


def nudged(params: Any) -> Any:
    return params | {"embed": params["embed"] + 1e-5}


def test_a_version_that_was_published_with_other_bits_is_refuted(
    honest: Run, tmp_path: Path
) -> None:
    # given a run whose publisher gave out other weights as version 3 than the learner made
    run = copied(honest, tmp_path / "runs" / "run")
    info = ObjectInfo(1, "0" * 64, (Chunk("0" * 64, 1),))
    manifest = WeightsManifest(run.spec.name, 3, None, None, {}, (), {"other": info}, {})
    path = published_manifest(run.path, 3)
    path.parent.mkdir()
    path.write_bytes(sign_manifest(manifest, run.publisher))
    # then the state is equal, and the version is not
    found = replay(run.path, 2, 4, LOG)
    assert found.outcome == "refuted" and all("of version 3" in each for each in found.differing)
    # and a manifest that nobody signed proves nothing
    path.write_bytes(sign_manifest(manifest, run.worker))
    with pytest.raises(UserError, match="may not sign it"):
        replay(run.path, 2, 4, LOG)


def test_records_that_are_not_signed_or_name_another_batch_are_errors(
    honest: Run, tmp_path: Path
) -> None:
    run = copied(honest, tmp_path / "runs" / "run")
    # given a manifest that another key signed
    manifest = step_folder(run.path, 3) / "batch.json"
    run.add_batch(3, run.add_step(3, version=2)[:2], key=run.worker)
    with pytest.raises(UserError, match=r"batch\.json"):
        replay(run.path, 2, 4, LOG)
    # and one of the coordinator, of fewer groups
    run.add_batch(3, run.add_step(3, version=2)[:2])
    assert manifest.exists()
    with pytest.raises(UserError, match="names another batch manifest"):
        replay(run.path, 2, 4, LOG)


@pytest.mark.parametrize(
    ("what", "found"),
    [("0-4", [(0, 2), (2, 4)]), ("1", [(0, 2)]), ("2", [(2, 4)]), ("2-4", [(2, 4)])],
)
def test_intervals_lie_between_the_states_that_are_kept(
    what: str, found: list[tuple[int, int]], honest: Run
) -> None:
    assert intervals(honest.path, what) == found
    assert intervals(honest.path, "sample:9") == [(0, 2), (2, 4)]
    assert len(intervals(honest.path, "sample:1")) == 1


def test_intervals_whose_records_are_gone_are_none(honest: Run, tmp_path: Path) -> None:
    # given a run that has removed the rollouts of its first steps
    run = copied(honest, tmp_path / "runs" / "run")
    for path in step_folder(run.path, 0).glob("*.safetensors"):
        path.unlink()
    # then samples are drawn of what is left, and the others are said to be gone
    assert intervals(run.path, "sample:2") == intervals(run.path, "0-4") == [(2, 4)]
    with pytest.raises(UserError, match="whose manifests and rollouts are there"):
        intervals(run.path, "1")
    # and nothing waits for a manifest that is missing
    (step_folder(run.path, 3) / "batch.json").unlink()
    for what in ("3", "sample:1"):
        with pytest.raises(UserError, match="whose manifests and rollouts are there"):
            intervals(run.path, what)


@pytest.mark.parametrize("what", ["4", "1-3", "x", "sample:0", "-1", ""])
def test_what_is_no_interval_is_said(what: str, honest: Run) -> None:
    with pytest.raises(UserError, match="names no interval between the full states 0, 2, 4"):
        intervals(honest.path, what)
