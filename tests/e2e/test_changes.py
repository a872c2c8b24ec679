"""A run that changes as it goes: what it takes over while it is up, and what it resumes with."""

import json
import signal

import pytest

from runspec.spec.resolved import load_resolved
from tests.harness import LiveRun, runspec

pytestmark = pytest.mark.slow

STEPS = {"steps": 400}
CHECKS = {"verify.lease_timeout": "25s", "verify.prefill_share": 0.5}
OTHER_PLACES = {
    "samplers.volunteers.replicas": 2,
    "broadcast.relays.second.upstream": "[origin]",
    "learner.mesh.fsdp": 1,
    "learner.hardware.count": 1,
    "checkpoints.every": 3,
    "steps": 403,
}
"""A restart change of each kind: another fleet, another way there, another mesh, more steps."""


def test_a_run_changes_as_it_goes_and_trains_every_step_once(tmp_path):
    with LiveRun(tmp_path / "runs", "changing", STEPS) as run:
        # given a run under way
        run.wait_for_step(1)
        before = run.status()["roles"]
        # when a rolling change is applied to it
        run.overrides = {**STEPS, **CHECKS}
        done = runspec("apply", *run.words, timeout_s=240)
        # then coordinator, validator and sampler are others, and the learner has gone on
        assert done.returncode == 0, done.stderr + run.output()
        assert "taken over (serial 2)" in done.stdout
        after = run.status()["roles"]
        renewed = {name for name in after if after[name]["pid"] != before[name]["pid"]}
        assert renewed == {"coordinator", "validator-0", "volunteers-0"}
        assert load_resolved(run.dir).verify.lease_timeout == 25.0
        run.wait_for_step(len(run.metrics()) + 1)
        # when it is interrupted, and applied with other places and a little more to do
        run.process.send_signal(signal.SIGINT)
        run.process.wait(60)
        trained = len(run.metrics())
        run.overrides = {**CHECKS, **OTHER_PLACES}
        plan = json.loads(runspec("plan", *run.words, "--json").stdout)
        assert (plan["serial"], plan["change_class"]) == (2, "restart")
        run.apply()
        # then it goes on from its newest checkpoint on the other mesh, with both samplers
        run.wait_for_step(trained + 3)
        for name in ("volunteers-0", "volunteers-1"):
            log = run.dir / "logs" / f"{name}.log"
            run.wait_until(lambda log=log: "rollouts of version" in log.read_text(), name)
        assert "on 1 devices" in (run.dir / "logs" / "learner.log").read_text()
        rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert sum(row["rejected_rollouts"] for row in rows) == 0
