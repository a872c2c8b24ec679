"""The three attacks that the promise of an open run is about, with their effect TODAY.

These tests hold the faults. A mechanism that keeps the promise makes them fail; then each is turned
into what is promised: the run finishes within 1.5 times its undisturbed time.
"""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from tests.runspec.simulate.mixtures import KNOWN, mixture, outcome
from tests.runspec.simulate.simulated import LAPTOP, group, simulated, step_seconds

STEPS = ("--set", "steps=60")
UNDISTURBED_S = 0.42


def test_today_four_fresh_keys_with_rubbish_end_a_run_at_its_first_step(tmp_path: Path):
    swarm = """
workers:
  - {name: own, count: 1, known: true, arrives: 10s}  # its engine starts
  - {name: hostile, count: 4, strategy: {kind: rubbish}}
request: 10ms
"""
    result = simulated(*LAPTOP, *STEPS, swarm=swarm, folder=tmp_path)
    assert result["ended"] == "stalled"
    assert not result["steps"]
    assert result["seconds"] < 5.0
    assert "64 groups leased (max_groups allows 64)" in result["reason"]
    assert {s["what"] for s in result["sanctions"]} == {"quarantined"}  # none is banned in time


def test_today_four_recorded_keys_that_go_silent_end_an_established_run(tmp_path: Path):
    swarm = """
workers:
  - {name: own, count: 1, known: true}
  - {name: hostile, count: 4, strategy: {kind: collude, record: 1}}
request: 10ms
"""
    result = simulated(*LAPTOP, *STEPS, swarm=swarm, folder=tmp_path)
    assert result["ended"] == "stalled"
    assert result["steps"]  # it was established
    assert result["seconds"] == pytest.approx(240.0, abs=5.0)
    assert "64 groups withheld or late" in result["reason"]
    assert group(result, "hostile")["accepted"] == 4
    assert not result["sanctions"]


def test_today_one_key_that_answers_one_lease_in_four_slows_a_run_for_ever(tmp_path: Path):
    swarm = """
workers:
  - {name: own, count: 1, known: true}
  - {name: hostile, count: 1, strategy: {kind: alternate, honest: 1, of: 4}}
request: 10ms
"""
    result = simulated(*LAPTOP, *STEPS, swarm=swarm, folder=tmp_path)
    assert result["ended"] == "finished"
    assert step_seconds(result) > 18 * UNDISTURBED_S
    hostile = group(result, "hostile")
    assert hostile["withheld"] == pytest.approx(3 * hostile["accepted"], abs=3)
    assert not result["sanctions"]


def test_today_most_random_mixtures_take_a_known_worker_more_than_the_promised_time():
    """`python -m tests.campaigns open_runs` measures 200 of them."""
    drawn = [mixture(Random(f"open runs {seed}"), 1000) for seed in range(10)]
    found = [outcome(KNOWN, hostile) for hostile in drawn]
    assert sum(one.stalled or one.factor > 1.5 for one in found) > 5
    assert all(one.wasted < 0.1 for one in found)
