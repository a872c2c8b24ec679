"""The settled step of a run that is simulated with its own replicas."""

from __future__ import annotations

import pytest

from runspec.plan.estimate import estimate_run, timeline
from tests.runspec.estimate.test_run import shown
from tests.runspec.supervised import shipped

LEARNER_S = 0.2803
"""Time of a step of the laptop profile's learner, with one update by the sampler's log-probs."""


def laptop(*changes: str):
    simple = ("algorithm.updates_per_step=1", "algorithm.old_logprobs=sampler")
    return shipped(*simple, *changes, profile="laptop")


@pytest.mark.parametrize(
    ("tokens_s", "level", "step_s", "bottleneck"),
    [
        (1e6, 2, LEARNER_S, "learner"),
        (1000, 2, None, "volunteers"),
        # in step everybody waits for everybody
        (1000, 0, None, "volunteers"),
        (1e6, 0, None, "learner"),
    ],
)
def test_who_waits_least_is_the_bottleneck(tokens_s, level, step_s, bottleneck):
    changes = f"samplers.volunteers.tokens_per_s={tokens_s}", f"algorithm.async_level={level}"
    found, stalled = timeline(*laptop(*changes))
    assert found is not None and stalled == ""
    assert found.bottleneck == bottleneck and 0.0 <= found.lag <= level
    assert all(-1e-9 <= share <= 1.0 for share in found.idle.values())
    assert all(0.0 <= each.start <= each.end <= found.step_s for each in found.intervals)
    if level:  # who is behind never waits
        assert found.idle[bottleneck] == pytest.approx(0.0, abs=1e-9)
    assert step_s is None or found.step_s == pytest.approx(step_s, rel=1e-3)


def test_in_step_a_step_is_its_parts():
    # given one replica that samples a whole step in one lease
    changes = "algorithm.async_level=0", "samplers.volunteers.groups_per_submission=16"
    found, _ = timeline(*laptop(*changes, "verify.validators=1"))
    assert found is not None
    # then every task follows another, from publishing a version to training on its rollouts
    assert {each.what for each in found.intervals} == {
        *("publish", "fetch", "sample", "check", "train"),
    }
    assert sum(each.end - each.start for each in found.intervals) == pytest.approx(found.step_s)
    assert (found.lag, found.filled_share) == (0.0, 1.0)


def test_a_step_that_its_deadline_ends_trains_fewer_groups():
    changes = "samplers.volunteers.tokens_per_s=100", "algorithm.fill={deadline: 20s}"
    estimate = estimate_run(*laptop(*changes, "algorithm.fill.min_share=0.1"))
    assert estimate.timeline is not None and estimate.timeline.filled_share < 1.0
    assert "79% of the groups train: algorithm.fill.deadline (20 s)" in shown(estimate, width=200)
    # and hours that end before the last step are spoken of
    estimate = estimate_run(*laptop(*changes[:1], "steps=100000"))
    assert "budget.max_hours is 1: the run stops" in " ".join(shown(estimate).split())


def test_a_run_that_trains_no_step_says_what_it_waits_for():
    # given leases that end before any worker can have sampled one
    changes = "samplers.volunteers.tokens_per_s=1", "verify.lease_timeout=10s"
    estimate = estimate_run(*laptop(*changes))
    assert estimate.timeline is None and estimate.run_s is None
    assert estimate.stalled in shown(estimate, width=300) != ""
