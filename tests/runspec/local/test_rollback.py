"""A run that is taken back, or starts anew before its first step: what goes, stays, is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from runspec.cli.runs import rollback_command
from runspec.core.canonical import digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import ObjectPath, write_atomic
from runspec.core.run_files import STATE_FILE, checkpoints_folder
from runspec.core.schema import RunSpec
from runspec.core.schema.load import dump_resolved, load_resolved, spec_digest
from runspec.local import prepare
from runspec.local.planning import STARTS_ANEW, make_plan, takes_any_change
from runspec.local.prepare import complete_rollback, roll_back, start_anew
from runspec.local.run_dir import hold
from runspec.local.state import RunState
from tests.object_store import BUCKET, s3_server
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.fake_run import TARGET_SHORT, ZERO, prepared, small_spec, store
from verify.coordinator.journal import Journal
from verify.coordinator.ledger import Ledger
from verify.coordinator.machine.events import (
    CoordinatorStarted,
    NonceDrawn,
    StepClosed,
    VersionPublished,
    WorkerRegistered,
)
from verify.coordinator.machine.state import Policy

pytestmark = pytest.mark.slow

STEPS = 6


def on_documents(overlap: int | None = None) -> RunSpec:
    """The small run's spec as one that trains on documents, on two islands if given an overlap."""
    spec = small_spec("small", STEPS).model_dump(mode="json")
    for field in ("samplers", "reward", "verify", "warm_start"):
        del spec[field]
    spec["data"] = {"sources": [{"name": "s", "kind": "text", "uri": "reads.txt"}]}
    spec["algorithm"] = {"kind": "pretrain", "tokens_per_update": 1024, "publish_every": 2}
    if overlap is not None:
        islands = {"members": [{"name": "a"}, {"name": "b"}], "overlap": overlap}
        spec["learner"] |= {"islands": islands, "master_dtype": "float32"}
    return RunSpec.model_validate(spec)


def small_run(runs_dir: Path, *overrides: str, spec: RunSpec | None = None) -> Path:
    """A finished run of six steps, small files in the places of large ones; states of 2, 4, 6."""
    run_dir = runs_dir / "small"
    spec = spec or small_spec("small", STEPS, *overrides)
    files: dict[str, bytes] = {
        "spec.json": dump_resolved(spec),
        "initial/config.json": b"{}",
        "keys/root.key": b"secret",
        "keys/roles.json": b"{}",
        "store/origin/served.json": b"{}",
        "store/origin/small/latest.json": b"{}",
        "store/relay-local/small/chunks/x": b"x",
        "work/volunteers-0/small/roles.json": b"{}",
        "checkpoints/params/v6/probe.json": b"{}",
        "logs/learner.log": b"a line\n",
        "metrics.jsonl": lines({"step": s, "task_reward": s / 10} for s in range(STEPS)) + b"torn",
        "samples.jsonl": lines({"step": s, "output": "x"} for s in range(STEPS) for _ in "ab"),
        "checkpoints/fingerprints.jsonl": lines({"step": s, "fingerprint": {}} for s in (0, 2, 5)),
    }
    files |= {f"weights/v{n}/model.safetensors": b"w" for n in range(2, STEPS + 1)}
    for step in range(STEPS):
        for name in ("batch.json", "ab.safetensors", "ab.verdict.json"):
            files[f"rollouts/step_{step}/{name}"] = b"{}"
    files["rollouts/step_6/cd.safetensors"] = b"of a lease beyond the last step"
    for step in (2, 4, 6):
        arrays, data = f"checkpoints/state/step_{step}/state/d/0", f"state {step}".encode()
        record = {"files": {"d/0": digest_bytes(data)}}
        files |= {arrays: data, f"checkpoints/state/step_{step}/state.json": dumps(record)}
    for name, data in files.items():
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_bytes(data)
    store(run_dir, *(replace(ZERO, version=version) for version in (0, 4, 6)))
    with closing(RunState(run_dir)) as state:
        state.begin("small", spec_digest(spec), STEPS)
        state.add_applied(spec_digest(spec), [])
        state.set_run("finished")
    with closing(Ledger(run_dir / STATE_FILE)) as ledger:
        ledger.append([WorkerRegistered(0.0, "k", "volunteers"), VersionPublished(0.0, 6, "d")])
        for step in range(STEPS):
            drawn, closed = NonceDrawn(1.0, step, "n", 1), StepClosed(2.0, step, (), "{}")
            ledger.append([drawn, closed])
    return run_dir


def lines(rows: Any) -> bytes:
    return b"".join(dumps(row) + b"\n" for row in rows)


def dumps(value: Any) -> bytes:
    return json.dumps(value).encode()


def tree(run_dir: Path) -> dict[str, bytes]:
    """Every file of a run but its database and its lock, which no rollback compares."""
    return {
        path.relative_to(run_dir).as_posix(): path.read_bytes()
        for path in sorted(run_dir.rglob("*"))
        if path.is_file() and not path.name.startswith(("state.db", "lock"))
    }


@pytest.mark.parametrize("spec", [None, on_documents()], ids=["grpo", "pretrain"])
def test_what_came_after_the_version_goes_and_the_rest_stays(
    tmp_path: Path, spec: RunSpec | None
) -> None:
    # given a finished run
    run_dir = small_run(tmp_path, spec=spec)
    before = tree(run_dir)
    # when it is taken back to its fourth version
    assert rollback_command("small", 4, True, tmp_path) == 0
    # then what is left is of the steps below it, and nothing that a key has signed
    after = tree(run_dir)
    assert {*after} - {"report.html", "summary.json"} == {
        "spec.json",
        "initial/config.json",
        "logs/learner.log",
        "metrics.jsonl",
        "samples.jsonl",
        "store/origin/served.json",
        "checkpoints/fingerprints.jsonl",
        *(f"checkpoints/state/step_{n}/{name}" for n in (2, 4) for name in STATE_FILES),
        *(f"weights/v{n}/model.safetensors" for n in (2, 3)),
        *(f"evaluations/held-out/v{n}.json" for n in (0, 4)),
        *(f"rollouts/step_{n}/batch.json" for n in range(4)),
    }
    # and every file that stays is as it was, lines of later steps cut off
    for name in ("metrics.jsonl", "samples.jsonl", "checkpoints/fingerprints.jsonl"):
        assert before[name].startswith(after[name])
    assert [json.loads(line)["step"] for line in after["metrics.jsonl"].splitlines()] == [*range(4)]
    assert len(after["samples.jsonl"].splitlines()) == 8
    assert len(after["checkpoints/fingerprints.jsonl"].splitlines()) == 2
    assert json.loads(after["summary.json"])["steps"] == 4
    # and its state says so
    with closing(RunState(run_dir)) as state:
        row, applied = state.run(), state.applied()
        assert row is not None
        assert (row.state, row.reason) == ("paused", "rolled back to version 4")
        assert [each.what for each in applied] == [[], ["rolled back to version 4"]]


STATE_FILES = ("state.json", "state/d/0")


def test_the_coordinator_goes_on_at_that_step_under_other_keys(tmp_path: Path) -> None:
    # given a run taken back twice
    run_dir = small_run(tmp_path)
    for version in (4, 2):
        with hold(run_dir):
            roll_back(run_dir, version)
    # when its coordinator starts
    journal = Journal(run_dir, Policy.of(load_resolved(run_dir)))
    # then the next step to open and to close is that one, and no batch has come back
    assert (journal.state.next_step, journal.state.next_close) == (2, 2)
    assert not journal.state.workers and journal.state.newest is None
    # and the newest version may be published anew, under whatever manifest
    journal.record(VersionPublished(3.0, 2, "another"))
    journal.close()
    # and version 0 is the starting model
    assert rollback_command("small", 0, True, tmp_path) == 0
    assert not any(name.startswith(("rollouts", "weights")) for name in tree(run_dir))
    assert tree(run_dir)["metrics.jsonl"] == b""
    assert not (run_dir / "summary.json").exists()
    # and it may be opened to go on, with new keys
    plan = make_plan(load_resolved(run_dir), run_dir)
    assert (plan.state, list(plan.changes)) == ("paused", [])
    with prepared(load_resolved(run_dir), tmp_path) as opened:
        assert (opened.directory / "keys" / "root.key").read_bytes() != b"secret"


class Killed(BaseException):
    """Stands for kill -9: nothing catches it."""


def acts(run_dir: Path, monkeypatch: pytest.MonkeyPatch, until: int) -> int:
    """Rolls back to version 4 and is killed before its act number `until`; how many it made."""
    made = 0

    def counted(act: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            nonlocal made
            if made == until:
                raise Killed
            made += 1
            return act(*arguments, **named)

        return run

    with monkeypatch.context() as patch, hold(run_dir):
        for name in ("_remove", "_keep_steps_below", "write_atomic", "remove_leftovers"):
            patch.setattr(prepare, name, counted(getattr(prepare, name)))
        patch.setattr(prepare, "write_summary", counted(lambda *arguments: None))  # it draws
        roll_back(run_dir, 4)
    return made


def test_a_rollback_cut_short_is_completed_by_the_next_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given what an undisturbed rollback leaves
    intact = small_run(tmp_path / "intact")
    whole = tmp_path / "whole" / "small"
    shutil.copytree(intact, whole)
    before, count = tree(intact), acts(whole, monkeypatch, until=-1)
    after = tree(whole)
    for until in (0, 1, 2, *range(3, count - 2, 5), count - 2, count - 1):
        # when one is killed before one of its acts
        run_dir = tmp_path / str(until) / "small"
        shutil.copytree(intact, run_dir)
        with pytest.raises(Killed):
            acts(run_dir, monkeypatch, until)
        monkeypatch.setattr(prepare, "write_summary", lambda *arguments: None)
        with hold(run_dir):
            completed = complete_rollback(run_dir)
        # then it was not begun, or is completed, to the same files
        assert tree(run_dir) == (after if completed == 4 else before)
        assert complete_rollback(run_dir) is None
        assert (completed is None) == (until == 0), "only the intent begins it"


def unsettled(run_dir: Path) -> None:
    """Full states of islands that overlap steps lack the others' last shares."""
    for step in (2, 4):
        path = run_dir / f"checkpoints/state/step_{step}/state.json"
        path.write_bytes(dumps({**json.loads(path.read_bytes()), "beside": {"sent_params": []}}))


def damaged(run_dir: Path) -> None:
    (run_dir / "checkpoints/state/step_4/state/d/0").write_bytes(b"rotten")


def behind(run_dir: Path) -> None:
    """The ledger is of an earlier copy."""
    with closing(Ledger(run_dir / STATE_FILE)) as ledger:
        ledger.clear()


PINNED = small_spec("small", STEPS, f"identity.root_public_key={'ab' * 32}")


@pytest.mark.parametrize(
    ("spec", "prepare", "version", "words", "remedy"),
    [
        (None, None, 3, "no full state of version 3", "there is one of: 0, 2, 4, 6"),
        (None, damaged, 4, "d/0 is missing or not what was written", ""),
        (None, behind, 4, "the ledger has closed 0 steps only", "restore it"),
        (PINNED, None, 4, "a version number is published once", "model.hf: {}/weights/v4"),
        (on_documents(1), unsettled, 4, r"4: with learner.islands.overlap only", "of: 0, 6"),
    ],
)
def test_what_is_no_version_to_go_back_to_is_refused_before_anything_goes(
    tmp_path: Path,
    spec: RunSpec | None,
    prepare: Callable[[Path], None] | None,
    version: int,
    words: str,
    remedy: str,
) -> None:
    run_dir = small_run(tmp_path, spec=spec)
    if prepare is not None:
        prepare(run_dir)
    before = tree(run_dir)
    with pytest.raises(UserError, match=words) as error:
        rollback_command("small", version, True, tmp_path)
    assert remedy.format(run_dir) in error.value.remedy
    assert tree(run_dir) == before


def test_a_ledger_that_somebody_writes_is_not_touched(tmp_path: Path) -> None:
    """By a coordinator that was started by hand, or that has not ended yet."""
    run_dir = small_run(tmp_path)
    with closing(Journal(run_dir, Policy.of(load_resolved(run_dir)))):
        before = set(tree(run_dir))
        for act in (lambda: roll_back(run_dir, 2), lambda: start_anew(run_dir, keep_keys=False)):
            with pytest.raises(UserError, match="another process writes this run's ledger"):
                act()
        assert set(tree(run_dir)) == before


def test_states_in_an_object_store_go_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # given a run whose checkpoints lie in an object store
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        run_dir = small_run(tmp_path, f"checkpoints.dir=s3://{BUCKET}/checkpoints")
        folder = checkpoints_folder(run_dir, load_resolved(run_dir))
        assert isinstance(folder, ObjectPath)
        states, params = folder / "state", folder / "params"
        for step in (2, 4):
            (states / f"step_{step}" / "state" / "array").write(b"")
            (states / f"step_{step}").marker.write(b'{"files": {"array": "crc32c"}}')
        (params / "v4").marker.write(b"{}")
        # when it is taken back, then what came after goes there, too
        assert rollback_command("small", 2, True, tmp_path) == 0
        assert states.entries() == ["step_2"] and params.names() == []
        assert states.unfinished() == []
        # but not to a state that lacks an object
        (states / "step_2" / "state" / "array").unlink()
        with pytest.raises(UserError, match="array is missing"):
            roll_back(run_dir, 2)


def test_other_islands_keep_the_starting_model_alone(tmp_path: Path) -> None:
    # given a run whose second island has full states, shares and a folder
    spec = on_documents(overlap=0)
    checkpoints = spec.checkpoints.model_copy(update={"dir": str(tmp_path / "states")})
    run_dir = small_run(tmp_path, spec=spec.model_copy(update={"checkpoints": checkpoints}))
    shutil.move(run_dir / "checkpoints" / "state", tmp_path / "states" / "small" / "state")
    own = run_dir / "work" / "island-b"
    states = tmp_path / "states" / "small" / "islands" / "b" / "state"
    for path in (
        *(states / f"step_{step}" / "state.json" for step in (2, 4)),
        *(own / name for name in ("initial/config.json", "keys/roles.json", "metrics.jsonl")),
        *(run_dir / "store" / f"shares-{name}" / "small" / "roles.json" for name in "ab"),
    ):
        write_atomic(path, b"{}")
    # when the run is taken back
    assert rollback_command("small", 4, True, tmp_path) == 0
    # then nothing is left of the island but what version 0 was, and no share of anybody
    assert [*tree(own)] == ["initial/config.json"]
    assert not states.exists() or not [*states.iterdir()]
    assert not [name for name in tree(run_dir) if "shares-" in name]
    # and a run that starts anew takes another version 0
    with hold(run_dir):
        start_anew(run_dir, keep_keys=False)
    assert not own.exists()


CHANGED = ("seed=7", "steps=3", "algorithm.group_size=4", "checkpoints.every=3")


def command(name: str, runs_dir: Path, *overrides: str) -> CompletedProcess[str]:
    sets = ("name=small", "steps=5", *overrides)
    words: list[Any] = [word for text in sets for word in ("--set", text)]
    return runspec(name, TARGET_SHORT, "--profile", "laptop", "--runs-dir", runs_dir, *words)


@pytest.fixture
def untrained(tmp_path: Path) -> Path:
    """A run that has sampled and has published version 0, and has trained nothing."""
    with prepared(small_spec(), tmp_path) as run:
        pass
    for name in ("weights/v0/model.safetensors", "rollouts/step_0/ab.safetensors"):
        write_atomic(run.directory / name, b"of the old spec")
    for name in ("store/origin/small/latest.json", "initial/of_the_old_spec"):
        write_atomic(run.directory / name, b"of the old spec")
    with closing(Ledger(run.directory / STATE_FILE)) as ledger:
        ledger.append([CoordinatorStarted(0.0), NonceDrawn(0.0, 0, "n", 1)])
        ledger.append([NonceDrawn(0.0, 1, "m", 1), StepClosed(1.0, 0, (), "{}")])
    return run.directory


def test_a_run_that_has_trained_no_step_takes_any_change(tmp_path: Path, untrained: Path) -> None:
    root_key = (untrained / "keys" / "root.key").read_bytes()
    # when a changed spec is looked at, then what apply would do is shown
    assert f"newrun: {STARTS_ANEW}" in command("plan", tmp_path, *CHANGED).stdout
    assert STARTS_ANEW in command("diff", tmp_path, *CHANGED).stderr
    # and when it is opened with it, then nothing is left that was made from the old one
    changed = small_spec("small", 5, *CHANGED)
    with prepared(changed, tmp_path):
        pass
    assert load_resolved(untrained) == changed
    left = [path for path in untrained.rglob("*") if path.is_file()]
    assert not [path for path in left if path.read_bytes() == b"of the old spec"]
    assert (untrained / "keys" / "root.key").read_bytes() != root_key
    with closing(Ledger(untrained / STATE_FILE)) as ledger:
        assert list(ledger.events()) == []
    with closing(RunState(untrained)) as state:
        assert "seed: 42 there, 7 now" in state.applied()[-1].what


def test_a_trained_step_is_never_lost(tmp_path: Path) -> None:
    for trained in (
        *("checkpoints/params/v1/p", "weights/v1/p", "checkpoints/state/step_1/p"),
        "metrics.jsonl",
    ):
        folder = tmp_path / trained.replace("/", "-")
        with prepared(small_spec(), folder) as run:
            write_atomic(run.directory / trained, b'{"step": 0}\n')
        refused = command("apply", folder, "optimizer.lr=1e-3", "steps=4")
        assert refused.returncode == 1
        assert "these changes need a run of another name" in refused.stderr
        # then what differs is listed with both values; steps may be raised, not lowered
        assert "  optimizer.lr: 5e-05 there, 0.001 now" in refused.stderr
        assert "  steps: 5 there, 4 now" in refused.stderr
        assert load_resolved(run.directory).steps == 5
        assert (run.directory / trained).exists()


def test_settings_change_only_for_steps_that_are_not_trained(tmp_path: Path) -> None:
    # given a run that has trained two steps
    with prepared(small_spec(), tmp_path) as run:
        write_atomic(run.directory / "metrics.jsonl", b'{"step": 0}\n{"step": 1}\n')
    settings = ("changes.calmer.lr=1e-4", "changes.calmer.step={}")
    # when settings are to change at a later step, then a restart takes that over
    planned = command("plan", tmp_path, *(text.format(2) for text in settings))
    assert "restart: " in planned.stdout and "newrun" not in planned.stdout
    # and at a step that is trained they cannot change
    refused = command("apply", tmp_path, *(text.format(1) for text in settings))
    assert refused.returncode == 1
    assert "(2 steps are trained: 2 is the first step that may change)" in refused.stderr


def test_a_root_that_others_pin_takes_no_such_change_and_keeps_its_keys(tmp_path: Path) -> None:
    with prepared(small_spec(), tmp_path) as run:
        assert takes_any_change(run.directory)
        root = run.identity.root_public_key
    # given a new spec that pins the root, then its keys stay
    pinned = small_spec("small", 5, f"identity.root_public_key={root}")
    key = (run.directory / "keys" / "publisher.key").read_bytes()
    with prepared(pinned, tmp_path):
        assert (run.directory / "keys" / "publisher.key").read_bytes() == key
    assert not takes_any_change(run.directory)


def test_a_new_start_that_was_cut_short_is_completed_by_the_next_command(
    tmp_path: Path, untrained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = small_spec("small", 5, "seed=7")

    def killed(*arguments: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(prepare, "_keep_steps_below", killed)
        with pytest.raises(Killed), prepared(changed, tmp_path):
            pytest.fail("started with half of it removed")
    assert (untrained / "rollback.json").exists()
    with prepared(changed, tmp_path):
        assert not (untrained / "rollback.json").exists()
        assert load_resolved(untrained) == changed
    with closing(Ledger(untrained / STATE_FILE)) as ledger:
        assert list(ledger.events()) == []
