"""The whole loop, every part real: it learns nothing in six steps, but everything must hold."""

import json
import os
import signal

import pytest

from runspec.core.roles import open_roles
from runspec.core.spec.resolved import load_resolved
from tests.e2e.quick import QuickRun
from tests.harness import runspec
from verify.formats.batch import FILE_NAME, open_batch
from verify.formats.layout import step_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def finished(runs_dir):
    """A run with two samplers, kept whole: no checkpoint lets rollouts be deleted."""
    overrides = {"samplers.volunteers.replicas": 2, "checkpoints.every": 100}
    with QuickRun(runs_dir, "whole", overrides) as run:
        run.finish()
    return run


def test_every_step_is_trained_once_and_in_order(finished):
    assert [line["step"] for line in finished.metrics()] == list(range(6))
    assert all(line["complete"] for line in finished.metrics())


def test_every_rollout_of_an_honest_run_is_accepted(finished):
    summary = json.loads((finished.dir / "summary.json").read_text())
    assert summary["rollouts_rejected"] == 0
    assert summary["rollouts_accepted"] >= 6 * 16
    assert summary["steps"] == 6


def test_asynchrony_is_real_and_bounded(finished):
    # then some rollouts were sampled by a version older than the one they trained
    lags = [lag for line in finished.metrics() for lag in map(int, line["lag_histogram"])]
    assert max(lags) in (1, 2)


def test_sampler_and_validator_agree_on_log_probs(finished):
    assert max(line["logprob_diff"] for line in finished.metrics()) < 1e-4


def test_manifests_name_each_group_once_over_the_whole_run(finished):
    spec = load_resolved(finished.dir)
    root = json.loads((finished.dir / "keys" / "roles.json").read_text())["key"]
    roles = open_roles(
        (finished.dir / "keys" / "roles.json").read_bytes(), root_public_key=root, run=spec.name
    )
    groups = []
    for step in range(spec.steps):
        data = (step_folder(finished.dir, step) / FILE_NAME).read_bytes()
        batch = open_batch(data, coordinators=roles.coordinator, run=spec.name, step=step)
        assert len(batch.groups) == spec.algorithm.prompts_per_step
        assert all(0 <= step - group.version <= 2 for group in batch.groups)
        groups += [(group.submission, group.group) for group in batch.groups]
    assert len(set(groups)) == len(groups)


def test_both_samplers_took_part(finished):
    for index in range(2):
        log = (finished.dir / "logs" / f"volunteers-{index}.log").read_text()
        assert "rollouts of version" in log


def test_the_newest_version_is_published_and_the_report_written(finished):
    latest = json.loads((finished.dir / "store/origin/whole/latest.json").read_text())
    assert latest["payload"]["version"] == 6
    report = (finished.dir / "report.html").read_text()
    assert report.count("<svg") >= 6
    assert "http" not in report.replace("http://www.w3.org", "")  # nothing is fetched to show it


def test_applying_a_finished_run_says_so(finished):
    finished.apply()
    assert finished.process.wait(30) == 0
    assert "finished" in finished.output().lower()


def test_any_role_may_be_killed_at_any_time(runs_dir):
    # given a run under way, its learner in two processes
    steps = 30  # enough that most are left when the last role is killed
    with QuickRun(runs_dir, "killed", {"steps": steps, "learner.hosts": 2}) as run:
        run.wait_for_step(1)
        names = sorted(run.status()["roles"].keys() - {"warm-start"})
        assert len(names) == 8
        # when each role in turn is killed with no chance to say goodbye
        for name in names:
            # one that ended by itself, as a slow machine's learner may, has none for a moment
            run.wait_until(lambda name=name: run.pids()[name] is not None, f"a {name}")
            pid = run.pids()[name]
            os.kill(pid, signal.SIGKILL)
            run.wait_until(
                lambda name=name, pid=pid: run.pids()[name] not in (None, pid),
                f"a new {name}",
            )
        assert len(run.metrics()) < steps
        # then the run reaches its last step all the same
        summary = run.finish()
    assert [line["step"] for line in run.metrics()] == list(range(steps))
    assert summary["rollouts_rejected"] == 0


def test_a_finished_run_can_be_deleted(finished):
    assert runspec("delete", "whole", "--runs-dir", finished.runs_dir, "--yes").returncode == 0
    assert not finished.dir.exists()
