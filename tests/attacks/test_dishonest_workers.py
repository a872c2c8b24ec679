"""One run with dishonest workers beside an honest one, all real, interrupted and audited.

Shows: perturbed weights and edited tokens are rejected and nothing of theirs trains, while a
validator that prefills with torch accepts the honest worker; each group is trained once; Ctrl-C
ends a run; an audit of the run directory finds nothing.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from runspec.core.keys import SigningKey
from runspec.core.roles import open_roles
from runspec.core.run_files import step_folder
from runspec.core.spec.resolved import load_resolved
from runspec.local.children import EXIT_INTERRUPTED
from tests.e2e.quick import QuickRun, programs_kept
from tests.harness import PATIENCE_S, ROOT, LiveRun, standing_still
from tests.preloaded import Program
from verify.formats.batch import FILE_NAME, open_batch
from verify.formats.verdict import RolloutVerdict, decode_verdicts

pytestmark = pytest.mark.slow

Verdicts = dict[str, tuple[list[RolloutVerdict], dict[str, Any]]]
"""Table and signed statement of each submission."""
CHEAT = """
import runpy
runpy.run_module("tests.attacks.dishonest_worker", run_name="__main__", alter_sys=True)
"""
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


def start_cheat(run: LiveRun, mode: str) -> tuple[str, Program]:
    """Starts a dishonest worker; returns its public key and process."""
    key = SigningKey.generate()
    home = run.runs_dir / mode
    key.save(home / "worker.key")
    endpoints = json.loads((run.dir / "endpoints.json").read_text())
    process = Program(
        CHEAT,
        *(mode, "--run", run.name, "--coordinator", endpoints["coordinator"]),
        *("--weights", endpoints["origin"], "--public-key", root_key(run)),
        *("--key", home / "worker.key", "--dir", home, "--pool", "volunteers"),
        log=home / "log",
    )
    return key.public_hex, process


def root_key(run: LiveRun) -> str:
    return json.loads((run.dir / "keys" / "roles.json").read_text())["key"]


def verdicts_on(run: LiveRun, worker: str, seen: Verdicts) -> Verdicts:
    """Adds the verdicts on a worker's submissions to those seen; the files go some steps later."""
    for path in run.dir.glob("rollouts/step_*/[0-9a-f]*.verdict.json"):
        stem = path.name.removesuffix(".verdict.json")
        with suppress(FileNotFoundError):
            submission = json.loads((path.parent / f"{stem}.json").read_text())["payload"]
            if submission["worker"] == worker:
                table = (path.parent / f"{stem}.verdict.safetensors").read_bytes()
                seen[stem] = decode_verdicts(table), json.loads(path.read_text())["payload"]
    return seen


def groups_trained(run: LiveRun) -> list[tuple[str, int]]:
    """Submission and number of each group that the manifests of trained steps name."""
    spec = load_resolved(run.dir)
    roles = open_roles(
        (run.dir / "keys" / "roles.json").read_bytes(), root_public_key=root_key(run), run=spec.name
    )
    groups = []
    for step in range(len(run.metrics())):
        data = (step_folder(run.dir, step) / FILE_NAME).read_bytes()
        batch = open_batch(data, coordinators=roles.coordinator, run=spec.name, step=step)
        assert len(batch.groups) == spec.algorithm.prompts_per_step
        assert all(0 <= step - group.version <= 2 for group in batch.groups)
        groups += [(group.submission, group.group) for group in batch.groups]
    return groups


@pytest.fixture(autouse=True)
def programs(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[None]:
    """Compiled programs come from the runs before this one, where there were any."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    with programs_kept(tmp_path_factory.getbasetemp() / ".cache" / "others"):
        yield


@pytest.mark.usefixtures("preload_server")
class TestDishonestWorkers:
    """Perturbed weights and edited tokens in a run of real processes."""

    def test_perturbed_weights_and_edited_tokens_are_rejected(self, tmp_path_factory):
        runs = tmp_path_factory.mktemp("runs")  # beside those of other tests, whose start it uses
        overrides = {"steps": 400, "checkpoints.every": 1000, "verify.engine": "torch"}
        with QuickRun(runs, "attacked", overrides) as run:
            # given a run with an honest worker, joined by two that cheat
            run.wait_for_step(1)
            cheats, seen = {}, {"perturbed": {}, "edited": {}}
            try:
                # whose engines start while nothing is trained: nobody would be there to cheat
                with standing_still(run.pids()["learner"]):
                    for mode in ("perturbed", "edited"):
                        cheats[mode] = start_cheat(run, mode)
                    for mode, (_, process) in cheats.items():
                        log = run.runs_dir / mode / "log"
                        run.wait_until(
                            lambda log=log: log.exists() and " loaded in " in log.read_text(),
                            f"the {mode} worker's engine",
                            others=[process],
                        )
                for mode, (key, process) in cheats.items():
                    run.wait_until(
                        lambda key=key, mode=mode: len(verdicts_on(run, key, seen[mode])) >= 3,
                        f"three verdicts on the {mode} worker",
                        others=[process],
                    )
                # anything of theirs that was let through trains by then
                run.wait_for_step(len(run.metrics()) + 3)
            finally:
                for _, process in cheats.values():
                    process.kill()
                    process.wait()
            # when it is interrupted
            run.process.send_signal(signal.SIGINT)
            assert run.process.wait(PATIENCE_S) == EXIT_INTERRUPTED

        found = {
            mode: verdicts_on(run, key, seen[mode]).values() for mode, (key, _) in cheats.items()
        }
        groups = groups_trained(run)
        trained = {submission for submission, _ in groups}
        # then each of their submissions was rejected, by a check that names itself
        for mode, verdicts in found.items():
            assert [v["accepted"] for _, v in verdicts] == [False] * len(verdicts), mode
            assert all(v["reason"] for _, v in verdicts)
            # and nothing of theirs reached the learner
            assert not trained & {v["submission"] for _, v in verdicts}
        assert {v["reason"].split(":")[0] for _, v in found["edited"]} <= CHECKS
        # and the perturbation was of the size that must be caught
        distances = [
            row.logprob_diff
            for rows, _ in found["perturbed"]
            for row in rows
            if row.logprob_diff is not None
        ]
        assert np.mean(distances) >= 0.05
        # and the honest worker went on undisturbed: torch judges what vLLM sampled and JAX trains
        assert "engine torch" in (run.dir / "logs" / "validator-0.log").read_text()
        assert all(line["complete"] for line in run.metrics())
        assert max(line["logprob_diff"] for line in run.metrics()) < 1e-4
        # and each group was trained once
        assert len(set(groups)) == len(groups) > 0
        # and whoever audits the run finds nothing
        audit = [sys.executable, "-m", "verify", "audit", str(run.dir)]
        done = subprocess.run(audit, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
