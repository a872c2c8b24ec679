"""`runspec plan`, `apply PLAN` and `diff`: what they say and refuse, and by which exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest

from runspec.cli.apply import apply_command
from runspec.cli.checks import sound_spec
from runspec.cli.plan import diff_command, plan_command
from runspec.core.canonical import digest_bytes
from runspec.core.errors import BadUsage, UserError
from runspec.core.models import ModelConfig
from runspec.core.schema import RunSpec
from runspec.core.schema.load import SpecFiles, load_layers, spec_digest, with_profiles
from runspec.local.planning import StalePlan
from runspec.local.state import RunState
from runspec.plan import AotReport, BadPlan, compile_step
from tests.harness import TARGET_SHORT
from tests.runspec.cli.in_process import runspec
from tests.runspec.core.schema.spec_files import small_spec as spec_in
from tests.runspec.local.fake_run import prepared, small_spec
from tests.verify.profiles import document, made_profile

pytestmark = pytest.mark.slow

Prints = Callable[[], str]


@pytest.fixture
def out(capsys):
    """What was printed since the last call."""
    return lambda: capsys.readouterr().out


@pytest.fixture
def runs(tmp_path):
    """The folder of a run `small` of five steps, opened once and let go."""
    with prepared(small_spec(), tmp_path):
        pass
    return tmp_path


def files(*overrides: str) -> SpecFiles:
    return SpecFiles(TARGET_SHORT, "laptop", None, ["name=small", "steps=5", *overrides])


def plan(runs_dir: Path, *overrides: str, exit_code: bool = False) -> int:
    return plan_command(*astuple(files(*overrides)), exit_code=exit_code, runs_dir=runs_dir)


def planned_json(runs_dir: Path, out: Prints, *overrides: str) -> dict[str, Any]:
    assert plan_command(*astuple(files(*overrides)), as_json=True, runs_dir=runs_dir) == 0
    found: dict[str, Any] = json.loads(out())
    return found


def saved(runs_dir: Path, *overrides: str) -> Path:
    path = runs_dir / "small.plan"
    assert plan_command(*astuple(files(*overrides)), out=path, runs_dir=runs_dir) == 0
    return path


def test_a_new_run_is_shown_short_and_makes_nothing(tmp_path, out):
    runs_dir = tmp_path / "runs"
    assert plan(runs_dir, exit_code=True) == 6
    text = out()
    assert f"small is new: 5 steps, to lie in {runs_dir / 'small'}" in text
    assert "optimizer.lr" not in text and not runs_dir.exists()


def test_changes_are_grouped_by_what_they_do(runs, out):
    # given a change of every class, against a run that is not alive
    changes = "budget.max_hours=2.0", "verify.prefill_share=0.5", "checkpoints.every=3", "seed=7"
    assert plan(runs, *changes) == 0
    # then each stands under its class
    lines = [line.strip() for line in out().splitlines()]
    assert "small: 4 changes against the run at serial 1, which is interrupted" in lines
    for change_class, line in (
        ("hot: taken over when the run goes on", "~ budget.max_hours: 1.0 -> 2.0"),
        ("rolling: taken over when the run goes on", "~ verify.prefill_share: 1.0 -> 0.5"),
        ("restart: taken over when the run goes on", "~ checkpoints.every: "),
        ("newrun: no step was trained: starts anew", "~ seed: 42 -> 7"),
    ):
        at = next(i for i, text in enumerate(lines) if text.startswith(change_class))
        assert lines[at + 1].startswith(line)


def test_json_has_stable_keys(runs, out):
    report = planned_json(runs, out, "budget.max_hours=2.0")
    keys = "version run spec_digest serial change_class changes estimate groups lacking"
    assert list(report) == keys.split()
    spec = small_spec("small", 5, "budget.max_hours=2.0")
    assert (report["run"], report["serial"]) == ("small", 1)
    assert (report["spec_digest"], report["change_class"]) == (spec_digest(spec), "hot")
    change = {"path": "budget.max_hours", "before": 1.0, "after": 2.0, "kind": "change"}
    assert report["changes"] == [{**change, "change_class": "hot", "reason": ""}]
    assert planned_json(runs, out)["change_class"] is None
    assert planned_json(runs / "elsewhere", out)["change_class"] == "new"


def test_it_says_where_each_role_group_runs_and_by_which_command(runs, out):
    # given a run of which this machine starts all
    words = f"{TARGET_SHORT} --profile laptop --set name=small"
    apply = f"runspec apply {words} --set steps=5 --runs-dir {runs}"
    groups = planned_json(runs, out)["groups"]
    names = ["trunk", "relay-local", "validators", "evaluator", "volunteers"]
    assert [group["name"] for group in groups] == names
    assert all(group["here"] and group["commands"] == [apply] for group in groups)
    plan(runs)
    here = f"  this machine, by `apply`: {', '.join(names)}"
    trunk = "    (the trunk: coordinator, publisher, origin, and the learner)"
    assert f"\nWhere it runs\n{here}\n{trunk}\n    {apply}\n" in out()
    # when it leaves the pool's two replicas to others, then each has a command of its own
    away = "placement.roles=[validators, evaluator, relay-local]", "samplers.volunteers.replicas=2"
    groups = planned_json(runs, out, *away)["groups"]
    assert [group["here"] for group in groups] == [True, True, True, True, False]
    processes = ["volunteers-0", "volunteers-1"]
    commands = [f"runspec role {name} --bundle SITE/bundles/{name}.json" for name in processes]
    group = {"name": "volunteers", "processes": processes, "machine": "any machine", "devices": 0}
    assert groups[-1] == {**group, "here": False, "commands": commands}
    plan(runs, *away)
    text = out()
    assert "\n  one machine, by `apply`: trunk" in text and "this machine, by" not in text
    assert f"  others: volunteers\n    {commands[0]}, and 1 more\n" in text
    assert f"runspec prepare {words}" in text


def test_a_laptops_step_is_estimated_from_guesses_and_the_prompts_that_are_here(tmp_path):
    # given a spec for two cores that gives no speed, and problems beside it
    assert runspec("init", tmp_path, "--template", "problems").returncode == 0
    rows = ['{"prompt": "12345678"}', '{"prompt": "1234"}', f'{{"prompt": "{"long" * 99}"}}', "no"]
    (tmp_path / "problems.jsonl").write_text("\n".join(rows) + "\n")
    planned = runspec("plan", tmp_path / "spec.yaml", "--json", "--runs-dir", tmp_path)
    estimate = json.loads(planned.stdout)["estimate"]
    # then its time is there, every guess names its field, and prompts are as long as the rows'
    assert estimate["unknown"] == [] and estimate["timeline"]["step_s"] > 0
    sources = {each["name"]: (each["value"], each["source"]) for each in estimate["assumed"]}
    assert sources["a validator"][1] == "a guess for CPUs: set verify.tokens_per_s"
    source = "2 rows of problems, one character a token"
    assert sources["mean prompt tokens"] == (6.0, source)


def test_a_stale_plan_exits_4_with_what_changed(runs):
    # given a plan, after which the run was changed
    path = saved(runs, "budget.max_hours=2.0")
    with prepared(small_spec("small", 5, "placement.restarts=3"), runs):
        pass
    # when it is applied, then it is refused, and says by what it was overtaken
    with pytest.raises(StalePlan) as refused:
        apply_command(path, runs_dir=runs)
    assert refused.value.exit_code == 4
    assert "it saw serial 1" in str(refused.value)
    assert "serial 2: placement.restarts: 5 there, 3 now" in str(refused.value)


def test_an_edited_plan_and_options_beside_a_plan_exit_2(runs):
    path = saved(runs, "budget.max_hours=2.0")
    with pytest.raises(BadPlan, match="a plan is applied as it is"):
        apply_command(path, "laptop", runs_dir=runs)
    # and it is no spec
    with pytest.raises(BadUsage, match="a saved plan") as error:
        sound_spec(SpecFiles(path))
    assert error.value.remedy == f"`runspec apply {path}`"
    path.write_bytes(path.read_bytes().replace(b'"max_hours":2.0', b'"max_hours":9.0'))
    with pytest.raises(BadPlan, match="was edited") as edited:
        apply_command(path, runs_dir=runs)
    assert edited.value.exit_code == 2


def test_a_plan_of_a_finished_run_says_that_it_is_finished(finished, out):
    assert apply_command(saved(finished), runs_dir=finished) == 0
    assert "small is finished: all 5 steps are trained." in out()
    # and when it has changes, that they are not taken
    assert apply_command(saved(finished, "budget.max_hours=2.0"), runs_dir=finished) == 0
    assert "nothing is left to do: budget.max_hours: 1.0 there, 2.0 now" in out()


def test_an_unchanged_spec_keeps_the_serial_and_a_changed_one_raises_it(runs):
    for spec in (small_spec(), small_spec(steps=6), small_spec(steps=6)):
        with prepared(spec, runs):
            pass
    with closing(RunState(runs / "small")) as state:
        applied = [(row.serial, list(row.what)) for row in state.applied()]
    assert applied == [(1, []), (2, ["steps: 5 there, 6 now"])]


@pytest.mark.slow  # compiles the step
def test_aot_is_the_compilers_word_and_what_does_not_fit_an_error(tmp_path, out, monkeypatch):
    # given devices of a few bytes, at which no rule has looked
    def compiled(spec: RunSpec, config: ModelConfig) -> AotReport:
        hardware = spec.learner.hardware.model_copy(update={"memory": 1e3})
        learner = spec.learner.model_copy(update={"hardware": hardware})
        return compile_step(spec.model_copy(update={"learner": learner}), config)

    monkeypatch.setattr("runspec.cli.plan.compile_step", compiled)
    with pytest.raises(UserError, match=r"the step does not fit: it needs .* a device has 1"):
        plan_command(*astuple(files()), as_json=True, aot=True, runs_dir=tmp_path)
    aot = json.loads(out())["aot"]
    assert (aot["devices"], aot["where"], aot["fits"], aot["memory"]) == (2, "cpu", False, 1000)
    assert set(aot["programs"]) == {"publish", "score", "accumulate", "apply"}
    assert aot["argument_bytes"] > 0 and aot["flops"] > 0 and aot["compile_s"] > 0
    # the worst of the programs needs what stays, what it makes and what it needs meanwhile
    held = sum(aot["resident"].values())
    held -= 0 if aot["worst"] == "apply" else aot["resident"]["gradients"]
    assert aot["hbm_bytes"] == held + aot["output_bytes"] + aot["temp_bytes"]


def diff(runs_dir: Path, *overrides: str) -> int:
    return diff_command(*astuple(files(*overrides)), runs_dir=runs_dir)


def test_a_difference_is_shown_as_lines_and_none_not_at_all(runs, out):
    assert (diff(runs), out()) == (0, "")
    assert diff(runs, "seed=7", "samplers.volunteers.replicas=2") == 1
    lines = out().splitlines()
    assert lines[:2] == [f"--- {runs / 'small' / 'spec.json'}", f"+++ {TARGET_SHORT}"]
    changed = [line for line in lines[2:] if line[0] in "+-"]
    assert changed == ["-seed: 42", "+seed: 7", "-  replicas: 1", "+  replicas: 2"]
    # and without a run everything is new
    assert diff(runs / "none") == 1
    lines = out().splitlines()
    assert lines[0] == "--- /dev/null"
    assert all(line.startswith("+") for line in lines[3:])
    # and what cannot be read is no difference
    with pytest.raises(BadUsage, match="steps"):
        diff(runs, "steps=many")
    with pytest.raises(BadUsage):
        diff_command(runs / "none.yaml", runs_dir=runs)


def test_a_profile_is_shown_by_what_it_is_and_not_by_its_tables(tmp_path, out):
    # given a run that is judged by one profile, and a spec whose file is another
    file, issued = tmp_path / "profile.json", 1_767_225_600.0  # 2026-01-01
    old, new = (
        document(made_profile(issued=issued, expires=issued + days * 86400.0, rate=rate))
        for days, rate in ((30, 1e-6), (31, 1e-5))
    )
    file.write_text(old)
    entry = f"verify.profiles=[{{name: measured, file: {file}}}]"
    with prepared(with_profiles(load_layers(files(entry)).require(), tmp_path), tmp_path):
        pass
    assert (diff(tmp_path, entry), out()) == (0, "")
    file.write_text(new)
    # when they are compared
    assert diff(tmp_path, entry) == 1
    # then the lines say who was measured, how long it holds and how strict it is
    text = out()
    assert [line.strip() for line in text.splitlines()[2:] if line[0] in "+-"] == [
        f"-      digest: {digest_bytes(old.encode())}",
        f"+      digest: {digest_bytes(new.encode())}",
        "-      expires: '2026-01-31'",
        "-      rate: 1.0e-06",
        "+      expires: '2026-02-01'",
        "+      rate: 1.0e-05",
    ]
    assert "      pool: vllm, float32, cpu\n" in text
    assert "mismatch_share" not in text and "signature" not in text


def test_what_stands_beside_the_spec_is_found_from_anywhere(tmp_path, monkeypatch):
    # given a spec that names a directory beside it, and a process that runs elsewhere
    mine, project = tmp_path / "project" / "models" / "mine", tmp_path / "project"
    mine.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    spec = sound_spec(SpecFiles(spec_in(project, "model: {hf: models/mine}")))
    # then the run has the whole path, and a name that is no directory stays a name
    assert spec.model.hf == str(mine)
    pinned = spec_in(project, f"model: {{hf: some/model, revision: {'a' * 40}}}")
    assert sound_spec(SpecFiles(pinned)).model.hf == "some/model"
    # and a file beside the spec goes before one where the command runs
    source = "data: {sources: {x: {kind: jsonl, uri: problems.jsonl}}}"
    path = spec_in(project, source)
    for folder in (tmp_path, project):
        (folder / "problems.jsonl").write_text("")
        sources = {each.name: each.uri for each in sound_spec(SpecFiles(path)).data.sources}
        assert sources["x"] == str(folder / "problems.jsonl")
