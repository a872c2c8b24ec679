"""One run to its end, in which every role is killed once, and that hostile keys attack.

Shows: a run starts, trains each step once and in order though each of its roles is killed, the
learner in two processes, and though strangers answer leases with rubbish, go silent or answer one
in four; every rollout of its own is accepted and sampler and validator agree on log-probs; every
version that is due is evaluated once; Prometheus finds the figures of every process;
asynchrony is real and bounded; the newest version and the report are written; a finished run says
so when it is applied again, and can be deleted.
"""

import json
import os
import re
import signal
import subprocess
import sys
from urllib.request import urlopen

import pytest

from runspec.core.keys import SigningKey
from tests.attacks.hostile_keys import hostile, standings
from tests.e2e.quick import QuickRun
from tests.harness import runspec
from tests.runspec.local.dashboard.exported import report

pytestmark = pytest.mark.slow
STEPS = 14
"""Enough that some are left when the last role is killed."""
HOSTILE = {"rubbish": 8, "silent": 8, "alternating": 1}
"""Keys of each attack."""


def scraped(run):
    """The figures that each process shows Prometheus, by its name; of those that answer by now."""
    found = {}
    for target in json.loads((run.dir / "targets.json").read_text()):
        [address] = target["targets"]
        try:
            with urlopen(f"http://{address}/metrics", timeout=20) as answer:
                text = answer.read().decode()
        except OSError:  # it still starts
            continue
        figures = re.findall(r"^(runspec_\w+)", text, re.MULTILINE)
        found[target["labels"]["process"]] = set(figures)
    return found


@pytest.fixture(scope="module")
def finished(runs_dir):
    evaluation = "{name: held-out, source: spell_backward, every: 50, problems: 20, samples: 2}"
    overrides = {"steps": STEPS, "learner.hosts": 2, "evaluations": f"[{evaluation}]"}
    overrides["placement.metrics"] = "{}"
    with QuickRun(runs_dir, "whole", overrides) as run, hostile(run.dir, HOSTILE):
        # given a run under way, attacked from the first second
        run.wait_for_step(1)
        names = sorted(run.pids().keys() - {"warm-start"})
        assert len(names) == 9
        measured = set(names) - {"learner-1"}
        run.wait_until(lambda: scraped(run).keys() == measured, "the figures of every process")
        shown = scraped(run)
        assert "runspec_learner_loss" in shown["learner"]
        assert "runspec_worker_tokens_total" in shown["volunteers-0"]
        assert "runspec_validator_verdicts_total" in shown["validator-0"]
        assert "runspec_publisher_newest_version" in shown["publisher"]
        assert "runspec_broadcast_sent_bytes_total" in shown["relay-local"]
        assert "runspec_coordinator_steps_closed_total" in shown["coordinator"]
        # when each role in turn is killed with no chance to say goodbye
        for name in names:
            # one that ended by itself, as a slow machine's learner may, has none for a moment
            run.wait_until(lambda name=name: run.pids()[name] is not None, f"a {name}")
            pid = run.pids()[name]
            os.kill(pid, signal.SIGKILL)
            run.wait_until(
                lambda name=name, pid=pid: run.pids()[name] not in (None, pid), f"a new {name}"
            )
        assert len(run.metrics()) < STEPS
        # then the run reaches its last step all the same
        run.finish()
    return run


def test_every_step_is_trained_once_and_in_order(finished):
    assert [line["step"] for line in finished.metrics()] == list(range(STEPS))
    assert all(line["complete"] for line in finished.metrics())


def test_every_rollout_of_its_own_is_accepted_and_rubbish_is_not(finished):
    summary = json.loads((finished.dir / "summary.json").read_text())
    key = SigningKey.load(finished.dir / "keys" / "volunteers-0.key")
    own, others = standings(finished.dir, key.public_hex)
    assert (own.rejected, own.quarantine) == (0, None)
    assert len(others) == sum(HOSTILE.values())
    assert sum(each.rejected for each in others) > 0
    assert summary["rollouts_accepted"] >= STEPS * 16
    assert summary["steps"] == STEPS


def test_a_role_that_is_started_again_has_its_port_for_figures(finished):
    for log in (finished.dir / "logs").glob("*.log"):
        assert "no metrics at" not in log.read_text()


def test_an_audit_finds_nothing(finished):
    audit = [sys.executable, "-m", "verify", "audit", str(finished.dir)]
    done = subprocess.run(audit, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_first_and_the_last_version_are_evaluated(finished):
    summary = json.loads((finished.dir / "summary.json").read_text())
    results = summary["evaluations"]["held-out"]
    assert [each["version"] for each in results] == [0, STEPS]
    [shown] = report(finished.dir / "report.html")["head"]["evaluations"]
    assert shown.startswith(f"held-out, version {STEPS}")
    # and nobody waited for it: the learner's waits are for others, and what it took is known
    waits = {whom for line in finished.metrics() for whom in line["waits"]}
    assert waits and waits.isdisjoint({"evaluator", "evaluation"})
    assert all(each["cpu_s"] > 0 for each in results)


def test_asynchrony_is_real_and_bounded(finished):
    # then some rollouts were sampled by a version older than the one they trained
    lags = [lag for line in finished.metrics() for lag in map(int, line["lag_histogram"])]
    assert max(lags) in (1, 2)


def test_sampler_and_validator_agree_on_log_probs(finished):
    assert max(line["logprob_diff"] for line in finished.metrics()) < 1e-4


def test_the_newest_version_is_published_and_the_report_written(finished):
    latest = json.loads((finished.dir / "store/origin/whole/latest.json").read_text())
    assert latest["payload"]["version"] == STEPS
    page = report(finished.dir / "report.html")
    assert {"Evaluations", "Learning", "Policy and loss", "Time"} <= page["figures"].keys()
    # and every rollout of the newest steps is in it, with what became of it, and its text
    rows, details = page["rollouts"]["rows"], page["details"]
    at = page["rollouts"]["fields"].index("outcome")
    assert "trained" in {row[at] for row in rows} and len(rows) == len(details)
    lanes = [lane.split()[0] for lane, _ in page["timeline"]["lanes"]]
    assert {"learner", "publisher", "coordinator", "evaluator", "validator"} <= {*lanes}


def test_a_finished_run_says_so_and_can_be_deleted(finished):
    finished.apply()
    assert finished.process.wait(120) == 0
    assert "finished" in finished.output().lower()
    done = runspec("delete", "whole", "--runs-dir", finished.runs_dir, "--yes", timeout_s=120)
    assert done.returncode == 0
    assert not finished.dir.exists()
