"""A run that changes as it goes: what it takes over while it is up, and what it resumes with."""

import json
import signal

import pytest

from runspec.core.spec.resolved import load_resolved
from tests.e2e.quick import QuickRun
from tests.harness import PATIENCE_S, runspec

pytestmark = pytest.mark.slow

STEPS = {"steps": 400}
ROLLING = {
    "verify.lease_timeout": "25s",
    "verify.prefill_share": 0.5,
    "broadcast.format": "delta",
}
OTHER_PLACES = {
    "samplers.volunteers.replicas": 2,
    "verify.validators": 2,
    "broadcast.relays.second.upstream": "[origin]",
    "learner.mesh.fsdp": 1,
    "learner.hardware.count": 1,
    "checkpoints.every": 3,
    "steps": 403,
}
"""Restart changes of many kinds: another fleet, other ways to it, another mesh, more steps."""


def test_a_live_run_takes_a_rolling_change_over(runs_dir):
    # At so small a rate few float32 bits change.
    start = {**STEPS, "optimizer.lr": 1e-10}
    with QuickRun(runs_dir, "rolling", start) as run:
        # given a run under way
        run.wait_for_step(1)
        before = run.status()["roles"]
        # when a rolling change is applied to it
        run.overrides = {**start, **ROLLING}
        done = runspec("apply", *run.words, timeout_s=PATIENCE_S)
        # then all but learner and servers are others, and the learner has gone on
        assert done.returncode == 0, done.stderr + run.output()
        assert "taken over (serial 2)" in done.stdout
        after = run.status()["roles"]
        renewed = {name for name in after if after[name]["pid"] != before[name]["pid"]}
        assert renewed == {"coordinator", "publisher", "validator-0", "volunteers-0"}
        assert load_resolved(run.dir).verify.lease_timeout == 25.0
        # and steps are trained of what they do, of versions that came as deltas
        log = run.dir / "logs" / "volunteers-0.log"
        run.wait_until(lambda: "from held version" in log.read_text(), "a delta")
        run.wait_for_step(len(run.metrics()) + 1)


@pytest.fixture(scope="module")
def stopped(runs_dir):
    """A run that Ctrl-C ended after its second step, and its rows of metrics."""
    with QuickRun(runs_dir, "moving", {**STEPS, "placement.restarts": 1}) as run:
        run.wait_for_step(2)
        run.process.send_signal(signal.SIGINT)
        run.process.wait(60)
        yield run, run.metrics()


def test_a_role_that_keeps_dying_stops_the_run_with_its_last_words(stopped):
    # given a run whose worker's key was spoilt while it was down
    run, _ = stopped
    key = run.dir / "keys" / "volunteers-0.key"
    whole = key.read_bytes()
    key.write_text("not a key")
    try:
        # when it is applied again
        run.apply()
        code = run.process.wait(120)
    finally:
        key.write_bytes(whole)
    # then it stops, and says who died of what
    assert code == 1
    assert "cannot read a signing key" in run.output()


def test_a_stopped_run_goes_on_in_other_places(stopped):
    # given a run that was interrupted
    run, trained = stopped
    before = len(run.metrics())
    assert 2 <= len(trained) <= before
    # when it is applied with other places and a little more to do
    run.overrides = {**OTHER_PLACES, "placement.restarts": 1}
    plan = json.loads(runspec("plan", *run.words, "--json").stdout)
    assert (plan["serial"], plan["change_class"]) == (1, "restart")
    run.apply()
    # then it goes on from its newest checkpoint on the other mesh, with everyone at work
    run.wait_for_step(before + 2)
    for name, says in (
        ("volunteers-0", "rollouts of version"),
        ("volunteers-1", "rollouts of version"),
        ("validator-1", "accepted"),
    ):
        log = run.dir / "logs" / f"{name}.log"
        run.wait_until(lambda log=log, says=says: says in log.read_text(), name)
    assert "on 1 devices" in (run.dir / "logs" / "learner.log").read_text()
    # and no step is missing, and none was trained twice
    rows = run.metrics()
    assert rows[: len(trained)] == trained
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert sum(row["rejected_rollouts"] for row in rows) == 0
