"""The promise of an open run (docs/public-runs.md), against the three attacks that broke it before,
random mixtures, and the worst mixtures that a search found."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.runspec.simulate.found_mixtures import FOUND
from tests.runspec.simulate.mixtures import (
    KNOWN,
    STRANGERS,
    Group,
    Run,
    honest_population,
    key_cost_s,
    mixture,
    outcome,
    simulated,
)
from tests.runspec.simulate.simulated import LAPTOP
from tests.runspec.simulate.simulated import simulated as command

OWN = "workers:\n  - {name: own, count: 1, known: true%s}\n"


def ended(swarm: str, folder: Path) -> dict[str, Any]:
    """A run of 60 steps that finishes all of them."""
    result = command(*LAPTOP, "--set", "steps=60", swarm=swarm + "request: 10ms\n", folder=folder)
    assert result["ended"] == "finished"
    assert len(result["steps"]) == 60
    return result


@pytest.mark.parametrize(
    ("own", "hostile"),
    [
        # Its engine starts when the others have been there for a while.
        pytest.param(", arrives: 10s", "count: 8, strategy: {kind: rubbish}", id="rubbish"),
        pytest.param("", "count: 8, strategy: {kind: collude, record: 1}", id="silent with record"),
        pytest.param("", "count: 1, strategy: {kind: alternate, honest: 1, of: 4}", id="one in 4"),
    ],
)
def test_a_known_worker_takes_at_most_one_and_a_half_times_as_long(
    own: str, hostile: str, tmp_path: Path
):
    alone = ended(OWN % own, tmp_path)
    result = ended(OWN % own + f"  - {{name: hostile, {hostile}}}\n", tmp_path)
    assert result["seconds"] <= 1.5 * alone["seconds"]


@pytest.mark.parametrize("seed", range(5))
def test_random_mixtures_keep_the_promise(seed: int):
    """`python -m tests.campaigns open_runs` measures 200, of up to 1,000 keys."""
    hostile = mixture(Random(f"gate {seed}"), 100)
    keeps(KNOWN, hostile)
    keeps(STRANGERS, hostile)


@pytest.mark.parametrize(("run", "hostile"), FOUND)
def test_mixtures_that_a_search_found_keep_the_promise(run: Run, hostile: list[Group]):
    keeps(run, hostile)


def keeps(run: Run, hostile: list[Group]) -> None:
    """Holds that a run finishes in the promised time."""
    found = outcome(run, hostile)
    assert not found.stalled
    if run.known:
        assert found.factor <= 1.5
    assert found.key_s <= key_cost_s(run)


@pytest.mark.parametrize("async_level", [0, 2])
def test_honest_work_is_not_wasted(async_level: int):
    for seed in range(5):
        workers = honest_population(Random(f"honest {seed}"))
        result = simulated(Run(async_level=async_level), workers)
        assert result.ended == "finished"
        assert result.wasted_share is not None
        assert result.wasted_share <= 0.1
