"""`runspec plan` and `apply PLAN`: what they say, what they refuse, and by which exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runspec.cli.apply import apply_command
from runspec.cli.plan import does_not_fit, plan_command, plan_json
from runspec.cli.spec_files import Unreadable
from runspec.core.errors import UserError
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.resolved import spec_digest
from runspec.estimate.run import estimate_run
from runspec.local.planning import StalePlan, make_plan
from runspec.local.state import RunState
from runspec.plan.aot import AotReport
from runspec.plan.saved import BadPlan, read_plan
from tests.harness import TARGET_SHORT
from tests.runspec.local.fake_run import drive_roles, prepared, small_spec, usual_roles
from tests.runspec.local.test_supervise import Watch

Says = Callable[[], tuple[str, str]]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Says:
    """What was printed since the last call: (out, err)."""

    def read() -> tuple[str, str]:
        captured = capsys.readouterr()
        return captured.out, captured.err

    return read


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The folder of a run `small` of five steps, opened once and let go."""
    with prepared(small_spec(), tmp_path):
        pass
    return tmp_path


def files(*overrides: str) -> SpecFiles:
    return SpecFiles(TARGET_SHORT, "laptop", None, ["name=small", "steps=5", *overrides])


def plan(
    runs_dir: Path,
    *overrides: str,
    out: Path | None = None,
    as_json: bool = False,
    exit_code: bool = False,
) -> int:
    return plan_command(files(*overrides), out, as_json, exit_code, False, runs_dir)


def planned_json(runs_dir: Path, said: Says, *overrides: str) -> dict[str, Any]:
    assert plan(runs_dir, *overrides, as_json=True) == 0
    return json.loads(said()[0])


def test_a_new_run_is_shown_short_and_makes_nothing(tmp_path: Path, said: Says) -> None:
    runs_dir = tmp_path / "runs"
    assert plan(runs_dir, exit_code=True) == 6
    out, _ = said()
    assert f"small is new: 5 steps, to lie in {runs_dir / 'small'}" in out
    assert "optimizer.lr" not in out
    assert not runs_dir.exists()


def test_changes_are_grouped_by_what_they_do(runs: Path, said: Says) -> None:
    # given a change of every class
    changes = "budget.max_hours=2.0", "verify.prefill_share=0.5", "checkpoints.every=3", "seed=7"
    # when it is planned against a run that is not alive
    assert plan(runs, *changes) == 0
    # then each stands under its class
    lines = [line.strip() for line in said()[0].splitlines()]
    assert "small: 4 changes against the run at serial 1, which is interrupted" in lines
    for change_class, line in (
        ("hot: taken over when the run goes on", "~ budget.max_hours: 1.0 -> 2.0"),
        ("rolling: taken over when the run goes on", "~ verify.prefill_share: 1.0 -> 0.5"),
        ("restart: taken over when the run goes on", "~ checkpoints.every: "),
        ("newrun: it changes what is learned", "~ seed: 42 -> 7"),
    ):
        at = next(i for i, text in enumerate(lines) if text.startswith(change_class))
        assert lines[at + 1].startswith(line)


def test_json_has_stable_keys(runs: Path, said: Says) -> None:
    report = planned_json(runs, said, "budget.max_hours=2.0")
    assert list(report) == [
        *("version", "run", "spec_digest", "serial", "change_class"),
        *("changes", "estimate", "lacking"),
    ]
    spec = small_spec("small", 5, "budget.max_hours=2.0")
    assert (report["run"], report["serial"]) == ("small", 1)
    assert report["spec_digest"] == spec_digest(spec)
    assert report["change_class"] == "hot"
    assert report["changes"] == [
        {
            "path": "budget.max_hours",
            "before": 1.0,
            "after": 2.0,
            "kind": "change",
            "change_class": "hot",
            "reason": "",
        }
    ]
    assert planned_json(runs, said)["change_class"] is None
    assert planned_json(runs / "elsewhere", said)["change_class"] == "new"


@pytest.mark.parametrize("name", ["target_short", "target_long", "intellect2"])
def test_the_shipped_specs_have_a_plan_that_is_json(name: str, tmp_path: Path) -> None:
    from runspec.core.models.of_spec import model_config
    from runspec.core.spec.load import load_layers

    # given a shipped spec, which this machine could hardly run
    path = TARGET_SHORT.parent / f"{name}.yaml"
    spec = load_layers(SpecFiles(path), environ={}).spec
    assert spec is not None
    # when it is planned
    planned = make_plan(spec, tmp_path / spec.name)
    report = plan_json(planned, estimate_run(spec, model_config(spec, path.parent)))
    # then what is lacking is a note, and every number is one that JSON has
    assert report["change_class"] == "new"
    assert json.loads(json.dumps(report, allow_nan=False)) == json.loads(json.dumps(report))


def test_a_broken_spec_exits_1_with_findings_and_a_missing_one_2(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"optimizer\.lr"):
        plan(tmp_path, "optimizer.lr=fast")
    missing = SpecFiles(tmp_path / "none.yaml")
    with pytest.raises(Unreadable, match=r"none\.yaml") as error:
        plan_command(missing, None, False, False, False, tmp_path)
    assert error.value.exit_code == 2


def test_secrets_are_never_in_a_plan(
    tmp_path: Path, said: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a secret in the environment that the spec refers to
    monkeypatch.setenv("CANARY_TOKEN", "tweet-tweet-4711")
    secret = "secrets=[{name: TOKEN, from: {env: CANARY_TOKEN}}]"
    # when it is planned, saved and shown
    assert plan(tmp_path, secret, out=tmp_path / "p") == 0
    shown = said()
    assert plan(tmp_path, secret, as_json=True) == 0
    # then its name is there, and its value nowhere
    texts = [*shown, *said(), (tmp_path / "p").read_text()]
    assert any("CANARY_TOKEN" in text for text in texts)
    assert not any("tweet-tweet" in text for text in texts)


@pytest.mark.slow  # compiles the step
def test_aot_is_the_compilers_word_under_its_key(tmp_path: Path, said: Says) -> None:
    assert plan_command(files(), None, True, False, True, tmp_path) == 0
    aot = json.loads(said()[0])["aot"]
    assert aot["devices"] == 2
    # the batch and the state go in; on a CPU without figures nothing says what fits
    assert aot["argument_bytes"] > 0 and aot["temp_bytes"] > 0 and aot["flops"] > 0
    assert aot["hbm_bytes"] >= aot["argument_bytes"]
    assert (aot["fits"], aot["memory"]) == (None, None)


def test_what_does_not_fit_is_said_with_the_numbers() -> None:
    # given what the compiler says of a step that is too large, and of one that it refuses
    report = AotReport(
        devices=64,
        argument_bytes=60 * 10**9,
        temp_bytes=50 * 10**9,
        output_bytes=10**9,
        hbm_bytes=110 * 10**9,
        flops=1e15,
        compile_s=60.0,
        fits=False,
        worst="accumulate",
        memory=95 * 10**9,
        where="v5p:4x4x4",
        programs={"accumulate": {}, "apply": {}},
        resident={},
    )
    words = "Ran out of memory in memory space hbm"
    refused = replace(
        report, hbm_bytes=None, worst=None, programs={"apply": {"does_not_fit": words}}
    )
    # then a person reads both figures, and the compiler's words
    assert "it needs 110 GB, a device has 95 GB" in str(does_not_fit(report))
    assert f"the compiler refuses, a device has 95 GB\n  apply: {words}" in str(
        does_not_fit(refused)
    )


def saved(runs_dir: Path, *overrides: str) -> SpecFiles:
    assert plan(runs_dir, *overrides, out=runs_dir / "small.plan") == 0
    return SpecFiles(runs_dir / "small.plan")


def test_a_saved_plan_names_the_state_it_was_made_on(runs: Path) -> None:
    path = saved(runs, "budget.max_hours=2.0").path
    found = read_plan(path)
    assert found is not None
    assert found.spec == small_spec("small", 5, "budget.max_hours=2.0")
    assert (found.seen.serial, found.seen.spec_digest) == (1, spec_digest(small_spec()))


def test_a_stale_plan_exits_4_with_what_changed(runs: Path) -> None:
    # given a plan, after which the run was changed
    path = saved(runs, "budget.max_hours=2.0")
    with prepared(small_spec("small", 5, "placement.restarts=3"), runs):
        pass
    # when it is applied
    with pytest.raises(StalePlan) as refused:
        apply_command(path, False, runs)
    # then it is refused, and says by what it was overtaken
    assert refused.value.exit_code == 4
    assert "it saw serial 1" in str(refused.value)
    assert "serial 2: placement.restarts: 5 there, 3 now" in str(refused.value)


def test_a_plan_is_checked_again_under_the_lock(runs: Path) -> None:
    path = saved(runs, "budget.max_hours=2.0")
    found = read_plan(path.path)
    assert found is not None
    with prepared(small_spec("small", 5, "placement.restarts=3"), runs):
        pass
    with pytest.raises(StalePlan), prepared(found.spec, runs, seen=found.seen):
        pytest.fail("a stale plan was opened")


def test_an_edited_plan_and_options_beside_a_plan_exit_2(runs: Path) -> None:
    path = saved(runs, "budget.max_hours=2.0").path
    with pytest.raises(BadPlan, match="a plan is applied as it is"):
        apply_command(SpecFiles(path, "laptop"), False, runs)
    path.write_bytes(path.read_bytes().replace(b'"max_hours":2.0', b'"max_hours":9.0'))
    with pytest.raises(BadPlan, match="was edited") as error:
        apply_command(SpecFiles(path), False, runs)
    assert error.value.exit_code == 2


def test_a_plan_of_a_finished_run_says_that_it_is_finished(tmp_path: Path, said: Says) -> None:
    # given a run that is finished
    with prepared(small_spec(), tmp_path) as run:
        drive_roles(run, usual_roles(run), Watch())
    # when a plan without changes is applied
    assert apply_command(saved(tmp_path), False, tmp_path) == 0
    assert "small is finished: all 5 steps are trained." in said()[0]
    # and when changes are, then it says that they are not taken
    assert apply_command(saved(tmp_path, "budget.max_hours=2.0"), False, tmp_path) == 0
    assert "nothing is left to do: budget.max_hours: 1.0 there, 2.0 now" in said()[0]


def test_an_unchanged_spec_keeps_the_serial_and_a_changed_one_raises_it(runs: Path) -> None:
    for spec in (small_spec(), small_spec(steps=6), small_spec(steps=6)):
        with prepared(spec, runs):
            pass
    with closing(RunState(runs / "small")) as state:
        assert [(row.serial, list(row.what)) for row in state.applied()] == [
            (1, []),
            (2, ["steps: 5 there, 6 now"]),
        ]
