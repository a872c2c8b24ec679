from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from runspec.estimate.steady import timeline
from runspec.estimate.timeline import Model
from tests.runspec.estimate.test_timeline import model, models, replica


@pytest.mark.parametrize(
    ("token_s", "lag", "step_s", "learner_idle", "pool_idle", "bottleneck"),
    [
        (1.0, 2, 10.0, 0.0, 0.9, "learner"),
        (40.0, 2, 40.0, 0.75, 0.0, "pool"),
        # in step everybody waits for everybody
        (30.0, 0, 40.0, 0.75, 0.25, "pool"),
    ],
)
def test_who_never_waits_is_the_bottleneck(
    token_s: float, lag: int, step_s: float, learner_idle: float, pool_idle: float, bottleneck: str
) -> None:
    run = timeline(model(replica(token_s=token_s), async_level=lag, train_s=10.0))
    assert run.step_s == pytest.approx(step_s)
    assert run.idle["learner"] == pytest.approx(learner_idle)
    assert run.idle["pool"] == pytest.approx(pool_idle)
    assert run.bottleneck == bottleneck
    if lag == 0:
        assert (run.lag, run.full_s) == (0.0, pytest.approx(token_s))
    else:
        assert run.gains[bottleneck] > 0
        assert sum(run.gains.values()) == pytest.approx(run.gains[bottleneck])


@settings(max_examples=20, deadline=None)
@given(models())
def test_shares_are_shares(model: Model) -> None:
    run = timeline(replace(model, train_s=1.0 + model.train_s))

    assert all(-1e-9 <= share <= 1.0 + 1e-9 for share in run.idle.values())
    assert all(0.0 <= i.start <= i.end <= run.step_s * 30 for i in run.intervals)
    assert run.bottleneck in run.gains
    assert 0.0 <= run.lag <= model.async_level
    assert run.step_s >= 0.0
