"""The simulator beside `runspec plan`, and beside runs that were measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runspec.cli.in_process import runspec
from tests.runspec.core.spec.spec_files import SPECS
from tests.runspec.simulate.simulated import LAPTOP, group, simulated, step_seconds

ASYNC_LEVEL = 2
"""Of the shipped specs. So many steps at the end of a run nobody samples ahead of."""
PLACEMENTS = SPECS / "placements"


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param([*LAPTOP, "--set", "steps=200"], id="laptop"),
        pytest.param(
            [
                SPECS / "target_long.yaml",
                *("--placement", PLACEMENTS / "tpu_and_volunteers.yaml", "--set", "steps=40"),
            ],
            id="target_long with volunteers",
        ),
        pytest.param([SPECS / "intellect2.yaml", "--set", "steps=40"], id="intellect2"),
    ],
)
def test_with_honest_workers_only_it_agrees_with_plan(spec: list[str | Path], tmp_path: Path):
    planned = json.loads(runspec("plan", *spec, "--json", "--runs-dir", tmp_path).stdout)
    result = simulated(*spec, swarm=None, folder=tmp_path)
    assert result["ended"] == "finished"
    assert result["wasted_share"] == 0.0
    expected = planned["estimate"]["timeline"]["step_s"]
    assert step_seconds(result, leave_out=ASYNC_LEVEL + 1) == pytest.approx(expected, rel=0.02)


# Runs of docs/performance.md ("What asynchrony buys"): seconds a step, busy shares of the learner
# and of the sampler. A request to the coordinator took 3 to 19 ms there, on a busy machine.
MEASURED = {0: (0.997, 0.42, 0.34), 2: (0.559, 0.97, 0.80)}
PROFILE_LEARNER_S, PROFILE_SAMPLER_S, PROFILE_MFU, PROFILE_TOKENS_S = 0.4156, 0.33, 0.29, 9800


@pytest.mark.parametrize("level", MEASURED)
def test_it_agrees_with_runs_that_were_measured_on_a_laptop(level: int, tmp_path: Path):
    measured, learner_busy, sampler_busy = MEASURED[level]
    mfu = PROFILE_MFU * PROFILE_LEARNER_S / (measured * learner_busy)
    tokens = PROFILE_TOKENS_S * PROFILE_SAMPLER_S / (measured * sampler_busy)
    sets = [f"algorithm.async_level={level}", "steps=60", f"estimate.learner_mfu={mfu:.4f}"]
    sets.append(f"samplers.volunteers.tokens_per_s={tokens:.0f}")
    overrides = [word for change in sets for word in ("--set", change)]
    swarm = "workers: [{name: own, count: 1, known: true}]\nrequest: 15ms\n"
    result = simulated(*LAPTOP, *overrides, swarm=swarm, folder=tmp_path)
    assert step_seconds(result) == pytest.approx(measured, rel=0.15)


HALF_LEAVES = """
workers:
  - {name: known, count: 2, known: true}
  - {name: fast, count: 80, over: 6h, stays: 8h, away: 4h, crashes: 0.3}
  - name: slow
    count: 118
    speed: 0.5
    download: 590Mbit/s
    absent: [{begins: 2h, lasts: 8h, share: 0.5}]
validators: {count: 2, fails: 6h}
"""


@pytest.mark.slow
def test_hundreds_of_workers_of_which_half_leave(tmp_path: Path):
    spec = [SPECS / "target_long.yaml", "--set", "steps=12"]
    result = simulated(*spec, swarm=HALF_LEAVES, folder=tmp_path)
    assert len(result["steps"]) == 12
    slow = group(result, "slow")
    assert slow["accepted"] < slow["leases"]  # it is no run in which nothing happens


def test_equal_seeds_give_equal_runs(tmp_path: Path):
    swarm = """
workers:
  - {name: steady, count: 2, known: true}
  - {name: passing, count: 6, stays: 5s, away: 3s, crashes: 0.5, over: 4s}
  - {name: hostile, count: 2, strategy: {kind: alternate, misdeed: wrong}}
validators: {count: 2, fails: 4s, restarts: 1s}
request: 10ms
"""
    arguments = (*LAPTOP, "--set", "steps=30", "--set", "verify.lease_timeout=5s", "--seed")
    first, again, other = (
        simulated(*arguments, seed, swarm=swarm, folder=tmp_path) for seed in ("7", "7", "8")
    )
    assert first == again
    assert first["steps"] != other["steps"]
