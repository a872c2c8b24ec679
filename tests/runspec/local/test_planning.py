"""A run takes any change of its spec until its first step is trained, and then none of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.run_files import STATE_FILE
from runspec.core.spec.resolved import dump_resolved, load_resolved
from runspec.local import rollback
from runspec.local.planning import STARTS_ANEW, starts_anew, takes_any_change
from runspec.local.state import RunState
from runspec.plan.changes import difference
from tests.harness import ROOT, TARGET_SHORT
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.fake_apply import fake_roles
from tests.runspec.local.fake_run import prepared, small_spec
from tests.runspec.local.test_rollback import Killed
from tests.waiting import DEADLINE_S, eventually
from verify.coordinator.ledger.ledger import Ledger
from verify.coordinator.machine.events import CoordinatorStarted, NonceDrawn, StepClosed

pytestmark = pytest.mark.slow

CHANGED = ("seed=7", "steps=3", "algorithm.group_size=4", "checkpoints.every=3")


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Small processes in the places of a run's roles, and those that are listed beside them."""
    extra = ["dying"]
    fake_roles(monkeypatch, extra)
    yield extra


def command(name: str, runs_dir: Path, *overrides: str) -> CompletedProcess[str]:
    sets = ("name=small", "steps=5", "placement.restarts=0", *overrides)
    words: list[Any] = [word for text in sets for word in ("--set", text)]
    return runspec(name, TARGET_SHORT, "--profile", "laptop", "--runs-dir", runs_dir, *words)


def untrained(runs_dir: Path) -> Path:
    """What a run leaves that has sampled and has published version 0, and has trained nothing."""
    run_dir = runs_dir / "small"
    for name in ("weights/v0/model.safetensors", "rollouts/step_0/ab.safetensors"):
        write_atomic(run_dir / name, b"of the old spec")
    for name in ("store/origin/small/latest.json", "initial/of_the_old_spec"):
        write_atomic(run_dir / name, b"of the old spec")
    with closing(Ledger(run_dir / STATE_FILE)) as ledger:
        ledger.append([CoordinatorStarted(0.0), NonceDrawn(0.0, 0, "n", 1)])
        ledger.append([NonceDrawn(0.0, 1, "m", 1), StepClosed(1.0, 0, (), "{}")])
    return run_dir


def test_a_run_that_has_trained_no_step_takes_any_change(
    tmp_path: Path, failing: list[str]
) -> None:
    # given a run that ended before its first step
    assert command("apply", tmp_path).returncode == 1
    run_dir = untrained(tmp_path)
    root_key = (run_dir / "keys" / "root.key").read_bytes()
    # when a changed spec is looked at, then what apply would do is shown
    assert f"newrun: {STARTS_ANEW}" in command("plan", tmp_path, *CHANGED).stdout
    assert STARTS_ANEW in command("diff", tmp_path, *CHANGED).stderr
    # and when it is applied, then it says so, and trains every step of the new spec
    failing.clear()
    done = command("apply", tmp_path, *CHANGED)
    assert done.returncode == 0, done.stderr
    assert STARTS_ANEW in done.stdout.splitlines()
    assert load_resolved(run_dir).seed == 7
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 3
    # and nothing is left that was made from the old one
    left = [path for path in run_dir.rglob("*") if path.is_file()]
    assert not [path for path in left if path.read_bytes() == b"of the old spec"]
    assert (run_dir / "keys" / "root.key").read_bytes() != root_key
    with closing(Ledger(run_dir / STATE_FILE)) as ledger:
        assert list(ledger.events()) == []
    with closing(RunState(run_dir)) as state:
        assert state.serial() == 2
        assert "seed: 42 there, 7 now" in state.applied()[-1].what


@pytest.mark.parametrize(
    "trained",
    ["checkpoints/params/v1/p", "weights/v1/p", "checkpoints/state/step_1/p", "metrics.jsonl"],
)
def test_a_trained_step_is_never_lost(tmp_path: Path, trained: str) -> None:
    with prepared(small_spec(), tmp_path) as run:
        write_atomic(run.directory / trained, b'{"step": 0}\n')
    refused = command("apply", tmp_path, "seed=7")
    assert refused.returncode == 1
    assert "these changes need a run of another name" in refused.stderr
    assert "apply refuses them" in command("plan", tmp_path, "seed=7").stdout
    assert STARTS_ANEW not in command("diff", tmp_path, "seed=7").stderr
    assert load_resolved(run.directory).seed == 42
    assert (run.directory / trained).exists()


def test_a_root_that_others_pin_takes_no_such_change(tmp_path: Path) -> None:
    with prepared(small_spec(), tmp_path) as run:
        assert takes_any_change(run.directory)
        pinned = small_spec("small", 5, f"identity.root_public_key={'ab' * 32}")
        write_atomic(run.directory / "spec.json", dump_resolved(pinned))
    assert not takes_any_change(run.directory)


def test_the_keys_of_a_root_that_the_new_spec_pins_stay(tmp_path: Path) -> None:
    with prepared(small_spec(), tmp_path) as run:
        root = run.identity.root_public_key
    pinned = small_spec("small", 5, f"identity.root_public_key={root}")
    key = (run.directory / "keys" / "publisher.key").read_bytes()
    with prepared(pinned, tmp_path):
        assert (run.directory / "keys" / "publisher.key").read_bytes() == key


def test_full_states_of_another_run_are_not_taken_over(tmp_path: Path) -> None:
    with prepared(small_spec(), tmp_path):
        pass
    (tmp_path / "disk" / "small" / "state" / "step_2").mkdir(parents=True)
    done = command("apply", tmp_path, f"checkpoints.dir={tmp_path / 'disk'}")
    assert done.returncode == 1
    assert "full states of an earlier run" in " ".join(done.stderr.split())


def test_a_new_start_that_was_cut_short_is_completed_by_the_next_command(
    tmp_path: Path, failing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    failing.clear()
    with prepared(small_spec(), tmp_path):
        run_dir = untrained(tmp_path)

    def killed(*arguments: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(rollback, "_keep_steps_below", killed)
        with pytest.raises(Killed), prepared(small_spec("small", 5, "seed=7"), tmp_path):
            pytest.fail("started with half of it removed")
    done = command("apply", tmp_path, *CHANGED)
    assert done.returncode == 0, done.stderr
    assert not (run_dir / "rollback.json").exists()


def test_a_live_run_that_has_trained_no_step_is_to_be_paused_first(
    tmp_path: Path, failing: list[str]
) -> None:
    # given a live run whose learner waits
    failing.clear()
    write_atomic(tmp_path / "small" / "hold", b"")
    fake = [sys.executable, "-m", "tests.runspec.local.fake_run", str(tmp_path), "5"]
    with subprocess.Popen(fake, cwd=ROOT, stdout=subprocess.DEVNULL) as supervisor:
        log = tmp_path / "small" / "logs" / "learner.log"
        eventually(lambda: log.exists() and "starts at" in log.read_text(), "the learner")
        # when it is to take another seed
        refused = command("apply", tmp_path, "seed=7")
        # then that waits for a pause
        assert refused.returncode == 5
        assert f"`runspec pause {tmp_path / 'small'}`, then apply again" in refused.stderr
        assert refused.stderr.count("remedy:") == 1
        assert "until `runspec pause" in command("plan", tmp_path, "seed=7").stdout
        assert runspec("pause", "small", "--runs-dir", tmp_path).returncode == 0
        supervisor.wait(DEADLINE_S)
    (tmp_path / "small" / "hold").unlink()
    done = command("apply", tmp_path, "seed=7")
    assert done.returncode == 0, done.stderr
    assert STARTS_ANEW in done.stdout


def test_a_ledger_that_somebody_writes_is_not_cleared(tmp_path: Path) -> None:
    with prepared(small_spec(), tmp_path):
        run_dir = untrained(tmp_path)
    with closing(Ledger(run_dir / STATE_FILE)) as ledger:
        ledger.own()
        with (
            pytest.raises(UserError, match="another process writes this run's ledger"),
            prepared(small_spec("small", 5, "seed=7"), tmp_path),
        ):
            pytest.fail("started beside a coordinator")
    assert (run_dir / "weights" / "v0").exists()


def test_what_differs_is_listed_with_both_values(tmp_path: Path) -> None:
    old = small_spec("small", 5, "optimizer.lr=7e-4")
    new = small_spec("small", 4, "optimizer.lr=1e-3", "samplers.volunteers.max_new_tokens=40")
    with prepared(old, tmp_path) as run:
        write_atomic(run.directory / "metrics.jsonl", b'{"step": 0}\n')
    with pytest.raises(UserError) as error:
        starts_anew(difference(old, new), run.directory)
    text = str(error.value)
    assert "  optimizer.lr: 0.0007 there, 0.001 now" in text
    assert "  samplers.volunteers.max_new_tokens: 48 there, 40 now" in text
    assert "  steps: 5 there, 4 now" in text, "steps may be raised, not lowered"
    assert "--set name=NAME, or `runspec delete" in text
