"""The process that reads a run's problems: its deadline, its progress, its death."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runspec.core.spec.schema import RunSpec
from runspec.local import problems
from runspec.local.machine import this_machine
from runspec.local.planning import make_plan
from runspec.local.preflight import Missing
from runspec.local.problems import CheckedProblems, check_problems, with_problems
from tests.runspec.local.fake_run import small_spec
from tests.sampler.tasks.grading.plugin import install

PLUGIN = "print('hello')\nimport time\n{}\n"


def spec_with(plugin: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunSpec:
    """The laptop's run with a reward whose package does something when it is imported."""
    points = "[runspec.rewards]\nodd = odd_kinds:Odd\n"
    install(folder, monkeypatch, "odd_kinds", points, PLUGIN.format(plugin))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return small_spec("small", 5, "reward.odd.kind=odd")


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        ("time.sleep(600)", "said nothing for 8 s; its last lines:"),
        ("import os; os._exit(9)", "ended with exit code 9; its last lines:"),
        ("import os; os.kill(os.getpid(), 11)", "killed by SIGSEGV; its last lines:"),
    ],
)
def test_a_plugin_that_hangs_or_kills_the_process_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plugin: str, said: str
) -> None:
    monkeypatch.setattr(problems, "SHOWN_AFTER_S", 0.0)
    spec, told = spec_with(plugin, tmp_path, monkeypatch), list[str]()
    checked = check_problems(spec, this_machine(), told.append, silence_s=8.0)
    (lacking,) = checked.lacking
    assert lacking.path == "data.sources"
    assert said in lacking.thing
    assert "importing the kind odd of reward" in lacking.thing
    if "said nothing" in said:
        assert told[-1] == "reading the problems: importing the kind odd of reward"


def test_only_a_run_that_is_new_or_changed_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Missing("data.sources.words", "a fault")]
    monkeypatch.setattr(problems, "check_problems", lambda *_: CheckedProblems(found, []))
    plan = make_plan(small_spec(), tmp_path / "small")
    seen = replace(plan.seen, spec_digest="d")
    as_it_was = replace(plan, seen=seen, changes=[])

    def lacking(plan):
        return with_problems(plan, this_machine(), print).lacking

    assert lacking(plan) == found
    assert lacking(replace(plan, seen=seen)) == found
    assert lacking(as_it_was) == []
    assert lacking(replace(plan, held_by="process 1")) == []
    other = [Missing("model.hf", "gone")]
    assert lacking(replace(plan, lacking=other)) == other
