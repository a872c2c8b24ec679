from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from runspec.estimate.steady import timeline
from runspec.estimate.timeline import Model
from tests.runspec.estimate.test_timeline import model, models, replica


def test_a_learner_that_never_waits_is_the_bottleneck() -> None:
    run = timeline(model(replica(token_s=1.0), async_level=2, train_s=10.0))

    assert run.step_s == pytest.approx(10.0)
    assert run.idle["learner"] == pytest.approx(0.0)
    assert run.idle["pool"] == pytest.approx(0.9)
    assert run.bottleneck == "learner"
    assert run.gains["learner"] == pytest.approx(0.1)
    assert run.gains["pool"] == pytest.approx(0.0)


def test_samplers_that_never_wait_are_the_bottleneck() -> None:
    run = timeline(model(replica(token_s=40.0), async_level=2, train_s=10.0))

    assert run.step_s == pytest.approx(40.0)
    assert run.idle["pool"] == pytest.approx(0.0)
    assert run.idle["learner"] == pytest.approx(0.75)
    assert run.bottleneck == "pool"


def test_in_step_everybody_waits_for_everybody() -> None:
    run = timeline(model(replica(token_s=30.0), async_level=0, train_s=10.0))

    assert run.step_s == pytest.approx(40.0)
    assert run.idle["learner"] == pytest.approx(0.75)
    assert run.idle["pool"] == pytest.approx(0.25)
    assert run.lag == 0.0
    assert run.full_s == pytest.approx(30.0)


@settings(max_examples=20, deadline=None)
@given(models())
def test_shares_are_shares(model: Model) -> None:
    run = timeline(replace(model, train_s=1.0 + model.train_s))

    assert all(-1e-9 <= share <= 1.0 + 1e-9 for share in run.idle.values())
    assert all(0.0 <= i.start <= i.end <= run.step_s * 30 for i in run.intervals)
    assert run.bottleneck in run.gains
    assert 0.0 <= run.lag <= model.async_level
    assert run.step_s >= 0.0
