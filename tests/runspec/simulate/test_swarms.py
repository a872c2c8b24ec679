"""Members of a swarm: churn, validators that fail, every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.runspec.cli.in_process import runspec
from tests.runspec.simulate.simulated import LAPTOP, group, simulated

OWN = "workers:\n  - {name: own, count: 2, known: true}\n"
SHORT_LEASES = ("--set", "verify.lease_timeout=5s")


def run(swarm: str, folder: Path, *sets: str) -> dict[str, Any]:
    steps = ("--set", "steps=30")
    return simulated(*LAPTOP, *steps, *SHORT_LEASES, *sets, swarm=swarm, folder=folder)


def other(strategy: str, more: str = "") -> str:
    return f"{OWN}  - {{name: other, count: 2, {more} strategy: {{{strategy}}}}}\n"


def what(result: dict[str, Any], name: str = "other") -> set[str]:
    return {s["what"] for s in result["sanctions"] if s["worker"].startswith(name)}


def test_workers_that_leave_give_their_leases_back(tmp_path: Path):
    swarm = OWN + "  - {name: other, count: 8, stays: 1s, away: 500ms}\n"
    result = run(swarm, tmp_path)
    assert result["ended"] == "finished"
    # Coming back, they take the same leases up again; only one that nobody took up ends withheld.
    assert group(result, "other")["accepted"] > group(result, "other")["withheld"]


def test_workers_that_crash_leave_their_leases_open(tmp_path: Path):
    swarm = OWN + "  - {name: other, count: 8, stays: 300ms, away: 1h, crashes: 1.0}\n"
    result = run(swarm, tmp_path)
    assert result["ended"] == "finished"
    assert group(result, "other")["accepted"] < group(result, "other")["leases"]


def test_nobody_works_at_night(tmp_path: Path):
    swarm = "workers: [{name: own, count: 2, absent: [{begins: 2s, lasts: 50s, every: 1d}]}]\n"
    result = run(swarm, tmp_path)
    closed = [step["closed"] for step in result["steps"]]
    assert result["ended"] == "finished"
    assert not any(5.0 < at < 52.0 for at in closed)
    assert group(result, "own")["idle"] < 0.9  # of the time at which they were there


def test_a_run_waits_for_validators_that_failed_and_goes_on(tmp_path: Path):
    result = run(OWN + "validators: {count: 2, fails: 3s, restarts: 2s}\n", tmp_path)
    assert result["ended"] == "finished"
    assert group(result, "own")["trained"] == 30 * 128


def test_slow_links_and_late_arrivals_cost_time(tmp_path: Path):
    plain = "workers: [{name: own, count: 1, %s}]\n"
    near, far, late = (
        run(plain % more, tmp_path)["seconds"]
        for more in ("speed: 1.0", "download: 2Mbit/s", "arrives: 100s")
    )
    assert far > 2 * near
    assert late == pytest.approx(100.0 + near, abs=1.0)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        ("kind: refuse", set()),
        ("kind: rubbish", {"quarantined", "banned"}),
        ("kind: wrong", {"quarantined", "banned"}),
        ("kind: withhold", set()),
        ("kind: sleeper, record: 2, misdeed: rubbish", {"quarantined", "banned"}),
        ("kind: collude, record: 1, misdeed: wrong", {"quarantined", "banned"}),
        ("kind: alternate, honest: 3, of: 4, misdeed: rubbish", {"quarantined"}),
    ],
)
def test_who_is_banned(strategy: str, expected: set[str], tmp_path: Path):
    sets = ("--set", "algorithm.fill.max_groups=50", "--set", "verify.prefill_share=1.0")
    result = run(other(strategy), tmp_path, *sets)
    assert result["ended"] == "finished"
    assert what(result) >= expected
    assert bool(what(result)) == bool(expected)
    assert not what(result, "own")


@pytest.mark.parametrize("when", ["margin: 500ms", "after: 600ms", "after: 900ms"])
def test_answers_that_are_held_back_cost_little(when: str, tmp_path: Path):
    result = run(other(f"kind: delay, {when}"), tmp_path)
    assert result["ended"] == "finished"
    assert group(result, "other")["withheld"] == 0
    assert result["seconds"] < 1.5 * 30 * 0.42


def test_keys_that_ask_late_cost_little(tmp_path: Path):
    result = run(other("kind: late, record: 2, after: 300ms"), tmp_path)
    assert result["ended"] == "finished"
    assert group(result, "other")["leases"] > group(result, "other")["accepted"] >= 4
    assert result["seconds"] < 1.5 * 30 * 0.42


def test_a_run_waits_for_workers_until_its_budget_ends_and_says_so(tmp_path: Path):
    result = run("workers: [{name: own, count: 1, arrives: 2h}]\n", tmp_path)
    assert result["ended"] == "max_hours"
    assert result["seconds"] == 3600.0
    assert result["reason"] == "a worker to register"


def test_people_read_a_table_and_a_page(tmp_path: Path):
    (tmp_path / "swarm.yaml").write_text(other("kind: rubbish"))
    page = tmp_path / "page.html"
    arguments = (*LAPTOP, "--set", "steps=20", "--swarm", tmp_path / "swarm.yaml", "--plot", page)
    ended = runspec("simulate", *arguments)
    assert ended.returncode in (0, 1), ended.stderr
    assert "steps an hour: " in ended.stdout
    assert "the next step to close waits for: " in ended.stdout
    assert "x quarantined" in ended.stdout
    assert page.read_text().count("<svg") == 2
