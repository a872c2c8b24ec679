"""A run that changes as it goes: what it takes over while it is up, and what it resumes with."""

import json
import signal

import pytest

from runspec.spec.resolved import load_resolved
from tests.e2e.quick import QuickRun
from tests.harness import runspec

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
        done = runspec("apply", *run.words, timeout_s=240)
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


def test_a_stopped_run_goes_on_in_other_places(runs_dir):
    with QuickRun(runs_dir, "moving", STEPS) as run:
        # given a run that was interrupted
        run.wait_for_step(2)
        run.process.send_signal(signal.SIGINT)
        run.process.wait(60)
        trained = len(run.metrics())
        # when it is applied with other places and a little more to do
        run.overrides = OTHER_PLACES
        plan = json.loads(runspec("plan", *run.words, "--json").stdout)
        assert (plan["serial"], plan["change_class"]) == (1, "restart")
        run.apply()
        # then it goes on from its newest checkpoint on the other mesh, with everyone at work
        run.wait_for_step(trained + 2)
        for name, says in (
            ("volunteers-0", "rollouts of version"),
            ("volunteers-1", "rollouts of version"),
            ("validator-1", "accepted"),
        ):
            log = run.dir / "logs" / f"{name}.log"
            run.wait_until(lambda log=log, says=says: says in log.read_text(), name)
        assert "on 1 devices" in (run.dir / "logs" / "learner.log").read_text()
        rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert sum(row["rejected_rollouts"] for row in rows) == 0
