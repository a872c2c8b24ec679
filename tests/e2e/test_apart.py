"""A sampler that somebody else starts: the run neither waits for it nor misses it at its end.

Its validator prefills with the torch engine, so that vLLM samples, torch judges and JAX trains.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runspec.local.prepared import PreparedRun
from runspec.local.processes import RoleSpec, role_specs
from tests.e2e.quick import QuickRun
from tests.harness import LiveRun

pytestmark = pytest.mark.slow


def role_elsewhere(run_dir: Path, name: str) -> RoleSpec:
    """The command line of a role that `placement.roles` leaves to other machines."""
    run = PreparedRun.inherited(run_dir, lock=-1)
    everything = run.spec.placement.model_copy(update={"roles": None})
    run = replace(run, spec=run.spec.model_copy(update={"placement": everything}))
    return next(role for role in role_specs(run) if role.name == name)


@pytest.fixture(scope="module")
def finished(runs_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> LiveRun:
    """A run without asynchrony whose sampler somebody else started."""
    # given a run that starts no sampler
    overrides = {
        "steps": 3,
        "placement.roles": "[validators, relay-local]",
        "samplers.volunteers.trust": "trusted",
        "algorithm.async_level": 0,
        "verify.engine": "torch",
    }
    words = tmp_path_factory.mktemp("volunteer") / "log"
    with QuickRun(runs_dir, "apart", overrides) as run:
        run.wait_until((run.dir / "keys" / "volunteers-0.key").exists, "the worker's key")
        run.wait_until(lambda: "coordinator" in run.pids(), "its roles")
        # when somebody starts one with the same words
        role = role_elsewhere(run.dir, "volunteers-0")
        with words.open("wb") as log:
            volunteer = subprocess.Popen(
                role.command, env={**os.environ, **role.env}, stdout=log, stderr=log
            )
        try:
            run.finish()
            # then it is told that all is done, and the run ends without it
            assert volunteer.wait(60) == 0, words.read_text()
        finally:
            volunteer.kill()
            volunteer.wait()
    return run


def summary(run: LiveRun) -> dict[str, Any]:
    return json.loads((run.dir / "summary.json").read_text())


def test_a_run_whose_sampler_is_elsewhere_reaches_its_end(finished: LiveRun) -> None:
    assert summary(finished)["steps"] == 3
    assert "volunteers-0" not in finished.status()["roles"]


def test_without_asynchrony_every_rollout_is_on_policy(finished: LiveRun) -> None:
    assert summary(finished)["max_lag"] == 0
    # lag 0 means that the policy trained is the policy that sampled
    assert max(line["policy_drift"] for line in finished.metrics()) < 1e-4


def test_torch_judges_what_vllm_sampled_and_jax_trains(finished: LiveRun) -> None:
    assert "engine torch" in (finished.dir / "logs" / "validator-0.log").read_text()
    assert summary(finished)["rollouts_rejected"] == 0
    assert all(line["trained_rollouts"] == 16 for line in finished.metrics())
    assert max(line["logprob_diff"] for line in finished.metrics()) < 1e-4
