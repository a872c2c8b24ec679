"""What the page knows of rollouts: all of them, what became of each, and which check failed."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import pytest

from runspec.local.dashboard.rollouts import FIELDS, Rollouts
from runspec.local.dashboard.source import FolderSource
from tests.runspec.local.dashboard.made_run import REASON, MadeRun
from verify.coordinator.machine.events import RolledBack

AT = {name: i for i, name in enumerate(FIELDS)}


def read(run: MadeRun, most: int = 1000) -> Rollouts:
    source = FolderSource(run.dir)
    found = Rollouts(source, most)
    for _, event in source.events(0):
        found.take(event)
    found.read(60.0)
    return found


@pytest.fixture
def run(tmp_path: Path) -> MadeRun:
    made = MadeRun(tmp_path)
    made.add_steps(10)
    return made


def test_each_rollout_has_its_outcome_and_advantage(run: MadeRun) -> None:
    # when ten steps are read, two of which were rejected
    rows = read(run).changes(-1)["rows"]
    # then all are listed, with what became of them
    outcomes = Counter(row[AT["outcome"]] for row in rows)
    assert outcomes == {"trained": 8 * 8, "rejected": 2 * 8}
    assert {row[AT["step"]] for row in rows if row[AT["outcome"]] == "rejected"} == {4, 9}
    # and one failed a check, which rejected the others of its submission too
    assert Counter(row[AT["check"]] for row in rows) == {None: 78, "toploc": 2}
    # and advantages are rewards less their group's mean
    assert {row[AT["advantage"]] for row in rows} == {-0.5, 0.5}
    assert len({row[AT["group"]] for row in rows}) == 20


def test_a_rejected_rollout_shows_the_check_its_number_and_the_limit(run: MadeRun) -> None:
    rollouts = read(run)
    rows = rollouts.changes(-1)["rows"]
    [failed, _] = [row for row in rows if row[AT["check"]]]
    detail = rollouts.detail(failed[AT["id"]])
    assert detail is not None
    assert detail["reason"] == REASON
    assert detail["checks"][1] == ["toploc", False, 9.0, 8.0, "9 errors"]
    # and tokens, whose pieces are the output, with both log-probs
    assert "".join(detail["pieces"]) == f"out {failed[AT['step']]}-0-3"
    assert set(detail["logprobs"]) == {-0.5} and set(detail["recomputed"]) == {-0.25}
    assert rollouts.detail(10**6) is None


def test_a_character_of_several_tokens_is_shown_once(tmp_path: Path) -> None:
    made = MadeRun(tmp_path, say=lambda step, group, sample: "aé☃b")
    made.add_steps(1)
    detail = read(made).detail(0)
    assert detail is not None
    assert detail["pieces"] == ["a", "", "é", "", "", "☃", "b"]


def test_words_are_found_in_whatever_case(run: MadeRun) -> None:
    rollouts = read(run)
    assert len(rollouts.search("OUT 3-1-2")) == 1
    assert len(rollouts.search("Problem-3 prompt")) == 8
    assert rollouts.search("nobody said this") == []


def test_only_what_is_new_is_told(run: MadeRun) -> None:
    # given a reader that knows ten steps
    source = FolderSource(run.dir)
    rollouts, events = Rollouts(source), list(source.events(0))
    for _, event in events:
        rollouts.take(event)
    rollouts.read(60.0)
    known = rollouts.revision
    assert rollouts.changes(known)["rows"] == []
    # when a step is trained
    run.add_steps(1)
    for _, event in source.events(events[-1][0]):
        rollouts.take(event)
    rollouts.read(60.0)
    # then its rollouts are told of, and no others
    assert {row[AT["step"]] for row in rollouts.changes(known)["rows"]} == {10}
    # and after a rollback those that it took back
    known = rollouts.revision
    rollouts.take(RolledBack(0.0, 9))
    assert len(rollouts.changes(known)["removed"]) == 2 * 8
    assert {row[AT["step"]] for row in rollouts.changes(-1)["rows"]} == set(range(9))


def test_the_newest_are_listed_where_there_are_too_many(run: MadeRun) -> None:
    changes = read(run, most=32).changes(-1)
    assert sorted({row[AT["step"]] for row in changes["rows"]}) == [6, 7, 8, 9]
    assert changes["judged"] == 80 and changes["unread"] == 0


def test_files_that_are_gone_are_counted(run: MadeRun) -> None:
    for step in range(5):
        shutil.rmtree(run.dir / "rollouts" / f"step_{step}")
    changes = read(run).changes(-1)
    assert changes["unreadable"] == 5
    assert len(changes["rows"]) == 40
