"""`runspec simulate`: members of a swarm, the promise of an open run, `runspec plan` and measured
runs beside it, and files that do not fit."""

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from runspec.core.errors import BadUsage
from runspec.simulate.population import read_swarm
from tests.runspec.cli.in_process import runspec
from tests.runspec.core.schema.spec_files import SPECS
from tests.runspec.simulate import mixtures
from tests.runspec.simulate.mixtures import FOUND, KNOWN, STRANGERS, Group, Run

pytestmark = pytest.mark.slow

LAPTOP = [SPECS / "target_short.yaml", "--profile", "laptop"]
"""Steps of 16 groups in leases of 8; a lease lasts 60 s; undisturbed a step takes 0.42 s."""


def sets(*changes: str) -> list[str]:
    return [word for change in changes for word in ("--set", change)]


def simulated(*arguments: str | Path, swarm: str | None, folder: Path) -> dict[str, Any]:
    """The result as `--json` has it, with a swarm file of that text."""
    if swarm is not None:
        (folder / "swarm.yaml").write_text(swarm)
        arguments = (*arguments, "--swarm", folder / "swarm.yaml")
    ended = runspec("simulate", *arguments, "--json")
    assert ended.returncode in (0, 1), ended.stderr
    result: dict[str, Any] = json.loads(ended.stdout)
    assert ended.returncode == (result["ended"] == "stalled")
    return result


def group(result: dict[str, Any], name: str) -> dict[str, Any]:
    """The figures of a group of workers."""
    return next(group for group in result["groups"] if group["name"] == name)


def step_seconds(result: dict[str, Any]) -> float:
    """Mean time of a step in the later half of the run."""
    ends = [step["trained_at"] for step in result["steps"] if step["trained_at"] is not None]
    settled = ends[len(ends) // 2 :]
    return (settled[-1] - settled[0]) / (len(settled) - 1)


OWN = "workers:\n  - {name: own, count: 2, known: true}\n"


def run(swarm: str, folder: Path, *changes: str) -> dict[str, Any]:
    """A run of 30 steps with leases of 5 s, which finishes."""
    chosen = sets("steps=30", "verify.lease_timeout=5s", *changes)
    result = simulated(*LAPTOP, *chosen, swarm=swarm, folder=folder)
    assert result["ended"] == "finished"
    return result


def other(strategy: str) -> str:
    return f"{OWN}  - {{name: other, count: 2, strategy: {{{strategy}}}}}\n"


def sanctions(result: dict[str, Any], name: str = "other") -> set[str]:
    return {s["what"] for s in result["sanctions"] if s["worker"].startswith(name)}


def test_who_leaves_gives_leases_back_and_who_crashes_does_not(tmp_path):
    gone = OWN + "  - {name: other, count: 8, stays: 1s, away: 500ms}\n"
    # Coming back, they take the same leases up again; only one that nobody took up ends withheld.
    left = group(run(gone, tmp_path), "other")
    assert left["accepted"] > left["withheld"]
    gone = OWN + "  - {name: other, count: 8, stays: 300ms, away: 1h, crashes: 1.0}\n"
    crashed = group(run(gone, tmp_path), "other")
    assert crashed["accepted"] < crashed["leases"]


def test_nobody_works_at_night(tmp_path):
    swarm = "workers: [{name: own, count: 2, absent: [{begins: 2s, lasts: 50s, every: 1d}]}]\n"
    result = run(swarm, tmp_path)
    assert not any(5.0 < step["closed"] < 52.0 for step in result["steps"])
    assert group(result, "own")["idle"] < 0.9  # of the time at which they were there


def test_a_run_waits_for_validators_that_failed_and_goes_on(tmp_path):
    result = run(OWN + "validators: {count: 2, fails: 3s, restarts: 2s}\n", tmp_path)
    assert group(result, "own")["trained"] == 30 * 128


def test_slow_links_and_late_arrivals_cost_time(tmp_path):
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
def test_who_is_banned(strategy, expected, tmp_path):
    changes = ("algorithm.fill.max_groups=50", "verify.prefill_share=1.0")
    result = run(other(strategy), tmp_path, *changes)
    assert sanctions(result) >= expected
    assert bool(sanctions(result)) == bool(expected)
    assert not sanctions(result, "own")


@pytest.mark.parametrize(
    "when",
    [
        *("kind: delay, margin: 500ms", "kind: delay, after: 600ms"),
        "kind: late, record: 2, after: 300ms",
    ],
)
def test_answers_that_are_held_back_and_keys_that_ask_late_cost_little(when, tmp_path):
    result = run(other(when), tmp_path)
    assert result["seconds"] < 1.5 * 30 * 0.42
    answered = group(result, "other")
    if "late" in when:
        assert answered["leases"] > answered["accepted"] >= 4
    else:
        assert answered["withheld"] == 0


def test_a_run_waits_for_workers_until_its_budget_ends_and_says_so(tmp_path):
    swarm = "workers: [{name: own, count: 1, arrives: 2h}]\n"
    result = simulated(*LAPTOP, swarm=swarm, folder=tmp_path)
    assert (result["ended"], result["seconds"]) == ("max_hours", 3600.0)
    assert result["reason"] == "a worker to register"


def test_people_read_a_table_and_a_page(tmp_path):
    (tmp_path / "swarm.yaml").write_text(other("kind: rubbish"))
    page = tmp_path / "page.html"
    arguments = (*LAPTOP, *sets("steps=20"), "--swarm", tmp_path / "swarm.yaml", "--plot", page)
    ended = runspec("simulate", *arguments)
    assert ended.returncode in (0, 1), ended.stderr
    for said in ("steps an hour: ", "the next step to close waits for: ", "x quarantined"):
        assert said in ended.stdout
    assert page.read_text().count("<svg") == 2


def test_equal_seeds_give_equal_runs(tmp_path):
    swarm = """
workers:
  - {name: steady, count: 2, known: true}
  - {name: passing, count: 6, stays: 5s, away: 3s, crashes: 0.5, over: 4s}
  - {name: hostile, count: 2, strategy: {kind: alternate, misdeed: wrong}}
validators: {count: 2, fails: 4s, restarts: 1s}
request: 10ms
"""
    arguments = (*LAPTOP, *sets("steps=20", "verify.lease_timeout=5s"), "--seed")
    first, again, another = (
        simulated(*arguments, seed, swarm=swarm, folder=tmp_path) for seed in ("7", "7", "8")
    )
    assert first == again
    assert first["steps"] != another["steps"]


# Runs of docs/performance.md ("What asynchrony buys"), with one update a step: seconds a step, busy
# shares of the learner and of the sampler. A request to the coordinator took 3 to 19 ms there, on a
# busy machine.
MEASURED = {0: (0.997, 0.42, 0.34), 2: (0.559, 0.97, 0.80)}
PROFILE_LEARNER_S, PROFILE_SAMPLER_S, PROFILE_MFU, PROFILE_TOKENS_S = 0.4156, 0.33, 0.29, 9800


@pytest.mark.parametrize("level", MEASURED)
def test_it_agrees_with_runs_that_were_measured_on_a_laptop(level, tmp_path):
    measured, learner_busy, sampler_busy = MEASURED[level]
    mfu = PROFILE_MFU * PROFILE_LEARNER_S / (measured * learner_busy)
    tokens = PROFILE_TOKENS_S * PROFILE_SAMPLER_S / (measured * sampler_busy)
    changes = sets(
        *(f"algorithm.async_level={level}", "steps=60", f"estimate.learner_mfu={mfu:.4f}"),
        *("algorithm.updates_per_step=1", "algorithm.old_logprobs=sampler"),
        f"samplers.volunteers.tokens_per_s={tokens:.0f}",
    )
    swarm = "workers: [{name: own, count: 1, known: true}]\nrequest: 15ms\n"
    result = simulated(*LAPTOP, *changes, swarm=swarm, folder=tmp_path)
    assert step_seconds(result) == pytest.approx(measured, rel=0.15)


@pytest.mark.parametrize(
    ("own", "hostile"),
    [
        # Its engine starts when the others have been there for a while.
        pytest.param(", arrives: 10s", "count: 8, strategy: {kind: rubbish}", id="rubbish"),
        pytest.param("", "count: 8, strategy: {kind: collude, record: 1}", id="silent with record"),
        pytest.param("", "count: 1, strategy: {kind: alternate, honest: 1, of: 4}", id="one in 4"),
    ],
)
def test_a_known_worker_takes_at_most_one_and_a_half_times_as_long(own, hostile, tmp_path):
    workers = f"workers:\n  - {{name: own, count: 1, known: true{own}}}\n"
    alone, beside = (
        simulated(*LAPTOP, *sets("steps=60"), swarm=f"{swarm}request: 10ms\n", folder=tmp_path)
        for swarm in (workers, f"{workers}  - {{name: hostile, {hostile}}}\n")
    )
    for result in (alone, beside):
        assert (result["ended"], len(result["steps"])) == ("finished", 60)
    assert beside["seconds"] <= 1.5 * alone["seconds"]


def drawn(seed: int) -> list[Group]:
    return mixtures.mixture(Random(f"gate {seed}"), 100)


@pytest.mark.parametrize(
    ("run", "hostile"),
    [
        # `python -m tests.campaigns open_runs` measures 200, of up to 1,000 keys
        *((run, drawn(seed)) for seed in range(3) for run in (KNOWN, STRANGERS)),
        *FOUND,
    ],
)
def test_mixtures_drawn_and_found_keep_the_promise(run, hostile):
    """A run finishes in the promised time."""
    found = mixtures.outcome(run, hostile)
    assert not found.stalled
    assert found.factor <= 1.5 or not run.known
    assert found.key_s <= mixtures.key_cost_s(run)


@pytest.mark.parametrize("async_level", [0, 2])
def test_honest_work_is_not_wasted(async_level):
    for seed in range(5):
        workers = mixtures.honest_population(Random(f"honest {seed}"))
        result = mixtures.simulated(Run(async_level=async_level), workers)
        assert result.ended == "finished"
        assert result.wasted_share is not None and result.wasted_share <= 0.1


PLAIN = "workers:\n  - {name: own, count: 1}\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PLAIN + "  - {name: x, count: 1, stay: 3h}\n", "swarm.yaml:3:25: error unknown-key"),
        (PLAIN + "  - {name: x, count: 1, stay: 3h}\n", "did you mean stays?"),
        (PLAIN + "  - {name: x, count: 1, stays: 3}\n", "swarm.yaml:3:32"),
        (PLAIN + "  - {name: own, count: 1}\n", "two groups of one name"),
        ("- 1\n", "a map was expected"),
        ("workers: [\n", "broken YAML"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text, said, tmp_path):
    (tmp_path / "swarm.yaml").write_text(text)
    with pytest.raises(BadUsage) as caught:
        read_swarm(tmp_path / "swarm.yaml")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("own", "code", "said"),
    [
        (None, 2, "swarm.yaml: cannot be read"),
        ("pool: elsewhere", 1, "the run has no pool 'elsewhere'"),
        ("hardware: {kind: cpu}", 1, "the speed of cpu is not "),
    ],
)
def test_a_swarm_that_does_not_fit_the_spec_is_named(own, code, said, tmp_path):
    if own is not None:
        (tmp_path / "swarm.yaml").write_text(f"workers: [{{name: own, count: 1, {own}}}]\n")
    ended = runspec("simulate", *LAPTOP, "--swarm", tmp_path / "swarm.yaml")
    assert ended.returncode == code and said in ended.stderr
    assert code == 2 or "own" in ended.stderr
