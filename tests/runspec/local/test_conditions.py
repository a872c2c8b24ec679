"""Conditions and what `wait` waits for, over snapshots made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runspec.cli.wait import Awaited, holds, parse_awaited, why_never
from runspec.core.errors import UserError
from runspec.local.conditions import Condition, condition, conditions, late_after_s
from runspec.local.snapshot import Snapshot
from runspec.local.state import EventRow, RoleRow, RunRow, SessionRow
from tests.runspec.local.fake_run import small_spec

NOW = 10_000.0


def role(name: str, state: str = "running", since: float = NOW - 100) -> RoleRow:
    return RoleRow(name, state, 0, 7, 7, since)


def step(number: int, ago: float) -> dict[str, Any]:
    return {"step": number, "time": NOW - ago}


def run_row(state: str, reason: str = "") -> RunRow:
    return RunRow("small", "digest", 5, state, reason, NOW - 500, None)


RUNNING = Snapshot(
    directory=Path("/runs/small"),
    spec=small_spec(),
    at=NOW,
    held_by="process 7 on here",
    run=run_row("running"),
    session=SessionRow(NOW - 400, NOW - 1),
    roles=[role("learner"), role("volunteers-0", since=NOW - 50)],
    events=[],
    rows=[step(0, 30.0), step(1, 20.0), step(2, 10.0)],
    versions=[0, 1, 2, 3],
    published_at=NOW - 9,
    wall_s=400.0,
)


def ended(state: str, reason: str = "", events: Sequence[EventRow] = ()) -> Snapshot:
    return replace(RUNNING, held_by=None, run=run_row(state, reason), events=events)


def found(seen: Snapshot, type_: str) -> Condition:
    return condition(conditions(seen), type_)


def true_ones(seen: Snapshot) -> list[str]:
    return [each.type for each in conditions(seen) if each.status == "True"]


def test_samplers_whose_log_probs_are_off_are_a_condition_with_its_numbers() -> None:
    off = {
        **step(3, 5.0),
        "sampler_logprob_diff_mean": 0.05,
        "sampler_logprob_limit": 0.02,
        "sampler_logprob_alarm": True,
    }
    alarmed = found(replace(RUNNING, rows=[off]), "LogprobAlarm")
    assert (alarmed.status, alarmed.reason, alarmed.since) == ("True", "AboveLimit", NOW - 5)
    assert "0.05 from the learner's" in alarmed.message
    assert "is 0.02" in alarmed.message
    near = {**off, "sampler_logprob_diff_mean": 0.01, "sampler_logprob_alarm": False}
    assert found(replace(RUNNING, rows=[off, near]), "LogprobAlarm").reason == "WithinLimit"
    assert found(RUNNING, "LogprobAlarm").reason == "NotCompared"


def test_a_newest_step_whose_rollouts_were_all_wrong_is_a_condition_with_its_remedy() -> None:
    solved, unsolved = ({**step(n, 5.0), "task_reward": r} for n, r in ((3, 0.25), (4, 0.0)))
    nothing = found(replace(RUNNING, rows=[solved, unsolved]), "NothingSolved")
    assert (nothing.status, nothing.reason, nothing.since) == ("True", "NoneRight", NOW - 5)
    assert nothing.message.startswith("no rollout of step 4 was right")
    assert "python -m sampler solve-rates" in nothing.message
    assert found(replace(RUNNING, rows=[unsolved, solved]), "NothingSolved").status == "False"
    assert found(RUNNING, "NothingSolved").reason == "NotGraded"


def test_a_run_that_trains_is_alive_ready_training_and_published() -> None:
    assert true_ones(RUNNING) == ["Alive", "Ready", "Training", "Published"]
    assert found(RUNNING, "Ready").since == NOW - 50, "when the last role came up"
    assert found(RUNNING, "Training").since == NOW - 10
    assert found(RUNNING, "Training").message == "step 3 of 5 was trained 10 s ago"


def test_a_step_is_late_by_the_pace_of_the_last_ones() -> None:
    # given steps of 100 s
    rows = [step(number, 1000.0 - 100 * number) for number in range(5)]
    slow = replace(RUNNING, rows=rows, session=SessionRow(NOW - 2000, NOW))
    assert late_after_s(slow) == 500.0
    assert found(slow, "Stalled").status == "True", "600 s ago"
    assert found(slow, "Training").status == "False"
    # but a minute is always granted, and before there is a pace the deadline of a step
    assert late_after_s(RUNNING) == 60.0
    assert late_after_s(replace(RUNNING, rows=[])) == RUNNING.spec.algorithm.fill.deadline


@pytest.mark.parametrize(
    ("state", "type_"), [("paused", "Paused"), ("failed", "Failed"), ("finished", "Finished")]
)
def test_an_end_is_its_condition_with_its_reason(state: str, type_: str) -> None:
    seen = ended(state, "because")
    assert true_ones(seen) == ["Published", type_]
    assert found(seen, type_).message == "because"
    assert found(seen, "Alive").since == NOW - 1


def test_a_step_that_the_coordinator_gave_up_is_a_stall() -> None:
    gave_up = EventRow(
        NOW - 3, "coordinator", "ended with exit code 4, stops the run: step 3 stalled: 0 of 4", 9
    )
    assert true_ones(ended("failed", "step 3 stalled", [gave_up])) == [
        "Published",
        "Stalled",
        "Failed",
    ]


@pytest.mark.parametrize(
    ("text", "awaited"),
    [
        ("Finished", Awaited("condition", "Finished")),
        ("condition=ready", Awaited("condition", "Ready")),
        ("condition=Ready=false", Awaited("condition", "Ready", "False")),
        ("alive=False", Awaited("condition", "Alive", "False")),
        ("step=20", Awaited("step", number=20)),
        ("version=0", Awaited("version", number=0)),
    ],
)
def test_what_is_awaited_is_read_as_kubectl_writes_it(text: str, awaited: Awaited) -> None:
    assert parse_awaited(text) == awaited


@pytest.mark.parametrize("text", ["", "step", "step=-1", "step=x", "pod=3", "Ready=maybe", "=="])
def test_anything_else_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(UserError, match="nothing that can be waited for"):
        parse_awaited(text)
    with pytest.raises(UserError, match="did you mean Finished"):
        parse_awaited("condition=Finsihed")


def test_steps_versions_and_conditions_hold_when_they_do() -> None:
    for text, expected in {
        "step=3": True,
        "step=4": False,
        "version=3": True,
        "version=4": False,
        "Ready": True,
        "Ready=false": False,
        "Finished": False,
    }.items():
        assert holds(parse_awaited(text), RUNNING) is expected, text


def test_only_what_nobody_is_about_to_do_is_hopeless() -> None:
    finished = parse_awaited("Finished")
    assert why_never(finished, RUNNING) is None
    assert why_never(finished, ended("paused")) is None, "somebody may resume it"
    assert why_never(finished, ended("failed", "it broke")) == "the run is failed (it broke)"
    assert why_never(parse_awaited("step=6"), RUNNING) == "the run has 5 steps"
