"""`runspec plan` and `apply PLAN`: what they say, what they refuse, and by which exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from runspec.cli.apply import apply_command
from runspec.cli.plan import plan_command
from runspec.core.errors import BadUsage, UserError
from runspec.core.models.config import ModelConfig
from runspec.core.spec.load import SpecFiles
from runspec.core.spec.resolved import spec_digest
from runspec.core.spec.schema import RunSpec
from runspec.local.planning import StalePlan
from runspec.local.state import RunState
from runspec.plan.aot import AotReport, compile_step
from runspec.plan.saved import BadPlan
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
        ("newrun: no step was trained: starts anew", "~ seed: 42 -> 7"),
    ):
        at = next(i for i, text in enumerate(lines) if text.startswith(change_class))
        assert lines[at + 1].startswith(line)


def test_json_has_stable_keys(runs: Path, said: Says) -> None:
    report = planned_json(runs, said, "budget.max_hours=2.0")
    assert list(report) == [
        *("version", "run", "spec_digest", "serial", "change_class"),
        *("changes", "estimate", "groups", "lacking"),
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


def test_it_says_where_each_role_group_runs_and_by_which_command(runs: Path, said: Says) -> None:
    # given a run of which this machine starts all
    apply = (
        f"runspec apply {TARGET_SHORT} --profile laptop --set name=small --set steps=5 "
        f"--runs-dir {runs}"
    )
    groups = planned_json(runs, said)["groups"]
    assert [group["name"] for group in groups] == [
        "trunk",
        "relay-local",
        "validators",
        "evaluator",
        "volunteers",
    ]
    assert all(group["here"] and group["commands"] == [apply] for group in groups)
    assert plan(runs) == 0
    lines = said()[0].splitlines()
    at = lines.index("Where it runs")
    everyone = "trunk, relay-local, validators, evaluator, volunteers"
    assert lines[at + 1] == f"  this machine, by `apply`: {everyone}"
    assert lines[at + 2] == f"    {apply}"
    # when it leaves the pool's two replicas to others
    away = "placement.roles=[validators, evaluator, relay-local]", "samplers.volunteers.replicas=2"
    groups = planned_json(runs, said, *away)["groups"]
    assert [group["here"] for group in groups] == [True, True, True, True, False]
    # then each has a command of its own
    commands = [
        f"runspec role {name} --bundle SITE/bundles/{name}.json"
        for name in ("volunteers-0", "volunteers-1")
    ]
    assert groups[-1] == {
        "name": "volunteers",
        "processes": ["volunteers-0", "volunteers-1"],
        "machine": "any machine",
        "here": False,
        "commands": commands,
    }
    assert plan(runs, *away) == 0
    out = said()[0]
    assert f"  others: volunteers\n    {commands[0]}, and 1 more\n" in out
    assert f"runspec prepare {TARGET_SHORT} --profile laptop --set name=small" in out


def test_a_broken_spec_exits_1_with_findings_and_a_missing_one_2(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"optimizer\.lr"):
        plan(tmp_path, "optimizer.lr=fast")
    missing = SpecFiles(tmp_path / "none.yaml")
    with pytest.raises(BadUsage, match=r"none\.yaml") as error:
        plan_command(missing, None, False, False, False, tmp_path)
    assert error.value.exit_code == 2


@pytest.mark.slow  # compiles the step
def test_aot_is_the_compilers_word_under_its_key_and_what_does_not_fit_an_error(
    tmp_path: Path, said: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given devices of a few bytes, at which no rule has looked
    def compiled(spec: RunSpec, config: ModelConfig) -> AotReport:
        hardware = spec.learner.hardware.model_copy(update={"memory": 1e3})
        learner = spec.learner.model_copy(update={"hardware": hardware})
        return compile_step(spec.model_copy(update={"learner": learner}), config)

    monkeypatch.setattr("runspec.cli.plan.compile_step", compiled)
    with pytest.raises(UserError, match=r"the step does not fit: it needs .* a device has 1"):
        plan_command(files(), None, True, False, True, tmp_path)
    aot = json.loads(said()[0])["aot"]
    assert (aot["devices"], aot["where"], aot["fits"], aot["memory"]) == (2, "cpu", False, 1000)
    assert set(aot["programs"]) == {"publish", "score", "accumulate", "apply"}
    assert aot["argument_bytes"] > 0 and aot["flops"] > 0 and aot["compile_s"] > 0
    # the worst of the programs needs what stays, what it makes and what it needs meanwhile
    held = sum(aot["resident"].values())
    if aot["worst"] != "apply":
        held -= aot["resident"]["gradients"]
    assert aot["hbm_bytes"] == held + aot["output_bytes"] + aot["temp_bytes"]


def saved(runs_dir: Path, *overrides: str) -> SpecFiles:
    assert plan(runs_dir, *overrides, out=runs_dir / "small.plan") == 0
    return SpecFiles(runs_dir / "small.plan")


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
