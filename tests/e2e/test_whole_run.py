"""One run of reinforcement learning with every role, in which whatever can go wrong does.

A volunteer joins by the link and leaves. Two workers cheat, others answer leases with rubbish or
not at all. Every role is killed once. The run trains each step once and in order; its rollouts are
accepted and the cheats' are not; the first and the last version are evaluated; an audit finds
nothing.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Set
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import pytest

from broadcast.layout import states_run, stored_versions
from runspec.core.files import write_atomic
from runspec.core.process import Endpoints, load_endpoints
from runspec.core.roles import open_roles
from runspec.core.run_files import step_folder
from runspec.core.schema.load import load_resolved
from runspec.core.signed import SigningKey
from tests.attacks.hostile_keys import hostile, standings
from tests.harness import LiveRun, standing_still
from tests.preloaded import Program
from tests.processes import alive, descendants
from tests.role_folder import write_folder
from tests.runspec.local.dashboard.made_run import report
from tests.volunteer import JOIN
from tests.waiting import eventually
from verify.formats.batch import FILE_NAME, open_batch
from verify.formats.findings import Finding, sign_finding
from verify.formats.verdict import RolloutVerdict, decode_verdicts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("preload_server")]

STEPS = 20
HOSTILE = {"rubbish": 3, "silent": 3}
"""Keys of each attack."""
CHEAT = """
import runpy
runpy.run_module("tests.attacks.dishonest_worker", run_name="__main__", alter_sys=True)
"""
MODES = ("perturbed", "edited")
CHECKS = {
    "reward",
    "logprobs",
    "logprobs_submission",
    "seeded_sampling",
    "seeded_sampling_submission",
    "toploc",
    "termination",
}
"""By which an edited token may be found."""
OVERRIDES = {
    "steps": STEPS,
    "algorithm.fill.deadline": "1h",
    "audit": "{states: 10}",
    "evaluations": "[{name: held-out, source: spell_backward, every: 50, problems: 8, samples: 2}]",
    "placement.metrics": "{}",
    "warm_start.stop_answer_probability": 1e-9,
}
FIGURES = {
    "learner": "runspec_learner_loss",
    "volunteers-0": "runspec_worker_tokens_total",
    "validator-0": "runspec_validator_verdicts_total",
    "publisher": "runspec_publisher_newest_version",
    "relay-local": "runspec_broadcast_sent_bytes_total",
    "coordinator": "runspec_coordinator_steps_closed_total",
}
"""A figure that the process of a role shows Prometheus."""
Verdicts = dict[str, tuple[list[RolloutVerdict], dict[str, Any]]]
"""Table and signed statement of each submission."""


def figures(run: LiveRun, names: Set[str]) -> dict[str, set[str]]:
    """Names of the figures that processes in `targets.json` show, of those that answer."""
    found = {}
    for target in json.loads((run.dir / "targets.json").read_text()):
        [address], name = target["targets"], target["labels"]["process"]
        if name in names:
            with suppress(OSError), urlopen(f"http://{address}/metrics", timeout=60) as answer:
                shown = re.findall(r"^(runspec_\w+)", answer.read().decode(), re.MULTILINE)
                found[name] = set(shown)
    return found


def root_key(run: LiveRun) -> str:
    return json.loads((run.dir / "keys" / "roles.json").read_text())["key"]


def start_cheat(run: LiveRun, mode: str) -> tuple[str, Program]:
    """Starts a dishonest worker; returns its public key and process."""
    key = SigningKey.generate()
    home = run.runs_dir / mode
    key.save(home / "worker.key")
    run_ends = load_endpoints(run.dir)
    assert run_ends is not None, "the run is up"
    ends = Endpoints(run_ends.coordinator, run_ends.origin)
    write_folder(home, load_resolved(run.dir), ends, root_key(run))
    process = Program(CHEAT, mode, "volunteers", home, home / "worker.key", log=home / "log")
    return key.public_hex, process


def verdicts_on(run: LiveRun, worker: str) -> Verdicts:
    """The verdicts on a worker's submissions."""
    found = {}
    for path in run.dir.glob("rollouts/step_*/[0-9a-f]*.verdict.json"):
        stem = path.name.removesuffix(".verdict.json")
        submission = json.loads((path.parent / f"{stem}.json").read_text())["payload"]
        if submission["worker"] == worker:
            table = (path.parent / f"{stem}.verdict.safetensors").read_bytes()
            found[stem] = decode_verdicts(table), json.loads(path.read_text())["payload"]
    return found


def volunteer_works_and_leaves(run: LiveRun, home: Path) -> None:
    """`runspec join` with the link that `status` shows, until Ctrl-C ends all that it started."""
    home.mkdir(parents=True)
    words = [run.status()["join"], "--key", home / "mine.key", "--dir", home / "work"]
    command, log = [sys.executable, "-c", JOIN, "join", *map(str, words)], home / "log"
    with log.open("ab") as out:
        process = subprocess.Popen(command, cwd=home, stdout=out, stderr=out)
    try:
        accepted = re.compile(r"\b[1-9]\d* rollouts accepted")
        run.wait_until(lambda: accepted.search(log.read_text()), "its work", others=[process])
        below = descendants(process.pid)
        assert len(below) > 1, "the worker, and vLLM's engine"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0, log.read_text()
    finally:
        process.kill()
        process.wait()
    assert "left; thank you" in log.read_text()
    eventually(lambda: not any(map(alive, below)), "no process of its is left")


def watcher_says(run: LiveRun, home: Path) -> str:
    """A watcher draws no interval, and hands over what it found before; returns its key."""
    key = SigningKey.generate()
    key.save(home / "watcher.key")
    found = Finding("whole", 0, 1, ["0" * 64] * 2, "equal", "all", share=0.5, finished=1.0)
    write_atomic(home / "found" / "0-1.json", sign_finding(found, key))
    words = [run.status()["join"], "--key", home / "watcher.key", "--dir", home / "found"]
    command = [sys.executable, "-m", "runspec", "watch", *map(str, words), "--share", "0", "--once"]
    subprocess.run(command, check=True)
    return key.public_hex


def kill(run: LiveRun, name: str) -> None:
    """Kills a role, and waits until the supervisor has started another."""
    pid = lambda: run.pids()[name]  # noqa: E731
    run.wait_until(pid, f"a {name}")
    os.kill(killed := pid(), signal.SIGKILL)
    run.wait_until(lambda: pid() not in (None, killed), f"a new {name}")


class Finished:
    """The run after its end, the public key of each cheat, and that of a watcher."""

    def __init__(self, run: LiveRun, cheats: dict[str, str], watcher: str) -> None:
        self.run, self.cheats, self.watcher = run, cheats, watcher
        self.summary = json.loads((run.dir / "summary.json").read_text())


@pytest.fixture(scope="module")
def finished(runs_dir: Path) -> Finished:
    with (
        ExitStack() as stack,
        LiveRun(runs_dir, "whole", OVERRIDES) as run,
        hostile(run.dir, HOSTILE),
    ):
        # given a run under way, attacked from the first second
        run.wait_for_step(1)
        names = run.pids().keys() - {"warm-start"}
        assert len(names) == 8
        with standing_still(run.pids()["learner"]):  # or the run could end before all are asked
            others = names - {"learner"}
            run.wait_until(lambda: figures(run, others).keys() == others, "figures of all others")
        shown = figures(run, names)
        assert {
            name: figure for name, figure in FIGURES.items() if figure in shown[name]
        } == FIGURES
        # when two cheats join, while the run's own worker stands still and leaves them the work
        with standing_still(run.pids()["volunteers-0"]):
            cheats = {mode: start_cheat(run, mode) for mode in MODES}
            for _, process in cheats.values():
                stack.callback(process.kill)
            for mode, (key, process) in cheats.items():
                run.wait_until(
                    lambda key=key: len(verdicts_on(run, key)) >= 2,
                    f"two verdicts on the {mode} worker",
                    others=[process],
                )
                process.kill()
            # and a volunteer joins, while the learner stands still, so that the run cannot end
            with standing_still(run.pids()["learner"]):
                volunteer_works_and_leaves(run, runs_dir / "volunteer")
                watcher = watcher_says(run, runs_dir / "watcher")
        # and each role is killed; the learner stands still until it is the last
        with standing_still(run.pids()["learner"]):
            for name in sorted(names - {"learner"}):
                kill(run, name)
        kill(run, "learner")
        # then the run reaches its last step all the same
        run.finish()
    return Finished(run, {mode: key for mode, (key, _) in cheats.items()}, watcher)


def test_every_step_is_trained_once_and_in_order(finished: Finished) -> None:
    lines = finished.run.metrics()
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert all(line["complete"] for line in lines)
    assert finished.summary["steps"] == STEPS
    assert finished.summary["rollouts_accepted"] >= STEPS * 16
    # and asynchrony is real and bounded
    assert max(int(lag) for line in lines for lag in line["lag_histogram"]) in (1, 2)
    # and sampler and validator agree on log-probs
    assert max(line["logprob_diff"] for line in lines) < 1e-4


def test_its_own_rollouts_are_accepted_and_rubbish_is_not(finished: Finished) -> None:
    key = SigningKey.load(finished.run.dir / "keys" / "volunteers-0.key")
    own, others = standings(finished.run.dir, key.public_hex)
    assert (own.rejected, own.quarantine) == (0, None)
    assert len(others) == sum(HOSTILE.values()) + len(MODES) + 1
    assert sum(each.rejected for each in others) > len(MODES)
    joined = SigningKey.load(finished.run.runs_dir / "volunteer" / "mine.key")
    own, _ = standings(finished.run.dir, joined.public_hex)
    assert own.accepted > 0 and own.rejected == 0


class TestDishonestWorkers:
    def test_perturbed_weights_and_edited_tokens_are_rejected_and_never_trained(
        self, finished: Finished
    ) -> None:
        run = finished.run
        found = {mode: verdicts_on(run, key).values() for mode, key in finished.cheats.items()}
        # then each of their submissions was rejected, by a check that names itself
        for mode, verdicts in found.items():
            assert len(verdicts) >= 2
            assert [v["accepted"] for _, v in verdicts] == [False] * len(verdicts), mode
        reasons = {mode: {v["reason"].split(":")[0] for _, v in found[mode]} for mode in MODES}
        assert all(reasons["perturbed"]) and reasons["edited"] <= CHECKS
        # and the perturbation was of the size that must be caught
        rows = [row for rows, _ in found["perturbed"] for row in rows]
        assert np.mean([r.logprob_diff for r in rows if r.logprob_diff is not None]) >= 0.05
        # and the learner trained each group once, and none of theirs
        roles = open_roles(
            (run.dir / "keys" / "roles.json").read_bytes(),
            root_public_key=root_key(run),
            run=run.name,
        )
        groups = []
        for step in range(STEPS):
            data = (step_folder(run.dir, step) / FILE_NAME).read_bytes()
            batch = open_batch(data, coordinators=roles.coordinator, run=run.name, step=step)
            assert len(batch.groups) == load_resolved(run.dir).algorithm.prompts_per_step
            groups += [(group.submission, group.group) for group in batch.groups]
        assert len(set(groups)) == len(groups)
        cheated = {v["submission"] for verdicts in found.values() for _, v in verdicts}
        assert not cheated & {submission for submission, _ in groups}


def test_the_audit_finds_nothing_and_trains_the_last_steps_again(finished: Finished) -> None:
    audit = [sys.executable, "-m", "verify", "audit", str(finished.run.dir)]
    done = subprocess.run(
        [*audit, "--replay", str(STEPS - 1)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *_, last = done.stdout.splitlines()
    assert last.endswith(f"to {STEPS - 1}: equal, every bit of the state after them")
    # and strangers are given full states, from the first to the last
    published = stored_versions(finished.run.dir / "store/origin", states_run("whole"))
    assert published[0] == 0 and published[-1] == STEPS and len(published) == 1 + -(-STEPS // 10)


def test_the_first_and_the_last_version_are_evaluated(finished: Finished) -> None:
    results = finished.summary["evaluations"]["held-out"]
    assert [each["version"] for each in results] == [0, STEPS]
    assert all(each["cpu_s"] > 0 for each in results)
    # and nobody waited for it
    waits = {whom for line in finished.run.metrics() for whom in line["waits"]}
    assert waits and waits.isdisjoint({"evaluator", "evaluation"})


def test_the_newest_version_is_published_and_the_report_written(finished: Finished) -> None:
    run = finished.run
    latest = json.loads((run.dir / "store/origin/whole/latest.json").read_text())
    assert latest["payload"]["version"] == STEPS
    page = report(run.dir / "report.html")
    assert {"Evaluations", "Learning", "Policy and loss", "Time"} <= page["figures"].keys()
    [shown] = page["head"]["evaluations"]
    assert (shown["name"], shown["newest"]) == ("held-out", STEPS)
    by = f"reported by {finished.watcher[:16]}"
    assert page["head"]["findings"]["rows"] == [["0 to 0", "equal", by]]
    assert "Alive" not in [condition for condition, *_ in page["head"]["conditions"]]
    # and every rollout of the newest steps is in it, with what became of it, and its text
    rows, details = page["rollouts"]["rows"], page["details"]
    at = page["rollouts"]["fields"].index("outcome")
    assert "trained" in {row[at] for row in rows} and len(rows) == len(details)
    lanes = [lane.split()[0] for lane, _ in page["timeline"]["lanes"]]
    assert {"learner", "publisher", "coordinator", "evaluator", "validator"} <= {*lanes}


def test_a_role_that_is_started_again_has_its_port_for_figures(finished: Finished) -> None:
    for log in (finished.run.dir / "logs").glob("*.log"):
        assert "no metrics at" not in log.read_text()
