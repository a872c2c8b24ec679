"""Dishonest workers beside an honest one, all real: rejected, and nothing of theirs trains."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from runspec.core.keys import SigningKey
from tests.e2e.quick import QuickRun, programs_kept
from tests.harness import ROOT, LiveRun
from verify.formats.verdict import decode_verdicts

pytestmark = pytest.mark.slow


def start_cheat(run: LiveRun, mode: str) -> tuple[str, subprocess.Popen[bytes]]:
    """Starts a dishonest worker; returns its public key and process."""
    key = SigningKey.generate()
    home = run.runs_dir / mode
    key.save(home / "worker.key")
    endpoints = json.loads((run.dir / "endpoints.json").read_text())
    root = json.loads((run.dir / "keys" / "roles.json").read_text())["key"]
    with (home / "log").open("ab") as log:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.attacks.dishonest_worker", mode),
                *("--run", run.name, "--coordinator", endpoints["coordinator"]),
                *("--weights", endpoints["origin"], "--public-key", root),
                *("--key", str(home / "worker.key"), "--dir", str(home), "--pool", "volunteers"),
            ],
            cwd=ROOT,
            env=os.environ | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
            stdout=log,
            stderr=log,
        )
    return key.public_hex, process


@contextmanager
def standing_still(pid: int) -> Iterator[None]:
    """A process that gets no processor time inside the block."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def verdicts_on(run: LiveRun, worker: str) -> list[tuple[Path, dict]]:
    """Verdict files on a worker's submissions, with their signed statements."""
    found = []
    for path in run.dir.glob("rollouts/step_*/[0-9a-f]*.verdict.json"):
        stem = path.name.removesuffix(".verdict.json")
        submission = json.loads((path.parent / f"{stem}.json").read_text())["payload"]
        if submission["worker"] == worker:
            table = path.parent / f"{stem}.verdict.safetensors"
            found.append((table, json.loads(path.read_text())["payload"]))
    return found


@pytest.fixture(autouse=True)
def programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled programs come from the runs before this one, where there were any."""
    with programs_kept(tmp_path_factory.getbasetemp() / ".cache" / "others"):
        yield


class TestDishonestWorkers:
    """Perturbed weights and edited tokens in a run of real processes."""

    def test_perturbed_weights_and_edited_tokens_are_rejected(self, tmp_path):
        overrides = {"steps": 400, "checkpoints.every": 1000}
        # Versions come as deltas: at so small a rate few bits change, even of float32.
        overrides |= {"broadcast.format": "delta", "optimizer.lr": 1e-10}
        with QuickRun(tmp_path, "attacked", overrides) as run:
            # given a run with an honest worker, joined by two that cheat
            run.wait_for_step(1)
            cheats = {}
            try:
                # whose engines start while nothing is trained: nobody would be there to cheat
                with standing_still(run.status()["roles"]["learner"]["pid"]):
                    for mode in ("perturbed", "edited"):
                        cheats[mode] = start_cheat(run, mode)
                    for mode, (_, process) in cheats.items():
                        log = run.runs_dir / mode / "log"
                        run.wait_until(
                            lambda log=log: " loaded in " in log.read_text(),
                            f"the {mode} worker's engine",
                            others=[process],
                        )
                for mode, (key, process) in cheats.items():
                    run.wait_until(
                        lambda key=key: len(verdicts_on(run, key)) >= 3,
                        f"three verdicts on the {mode} worker",
                        others=[process],
                    )
                step = len(run.metrics())
                run.wait_for_step(
                    step + 3
                )  # anything of theirs that was let through trains by then
            finally:
                for _, process in cheats.values():
                    process.send_signal(signal.SIGKILL)
                    process.wait()
            trained = {
                group["submission"]
                for path in run.dir.glob("rollouts/step_*/batch.json")
                for group in json.loads(path.read_text())["payload"]["groups"]
            }
            found = {mode: verdicts_on(run, key) for mode, (key, _) in cheats.items()}
            distances = [
                row.logprob_diff
                for table, _ in found["perturbed"]
                for row in decode_verdicts(table.read_bytes())
                if row.logprob_diff is not None
            ]

        # then each of their submissions was rejected, by a check that names itself
        for mode, verdicts in found.items():
            assert [v["accepted"] for _, v in verdicts] == [False] * len(verdicts), mode
            assert all(v["reason"] for _, v in verdicts)
            # and nothing of theirs reached the learner
            assert not trained & {v["submission"] for _, v in verdicts}
        # and they had the versions that they joined late for, and those after, as deltas
        assert "from held version" in (run.runs_dir / "perturbed" / "log").read_text()
        # and the perturbation was of the size that must be caught
        assert np.mean(distances) >= 0.05
        # and the honest worker went on undisturbed
        assert trained
        assert {v["reason"].split(":")[0] for _, v in found["edited"]} <= {
            "reward",
            "logprobs",
            "logprobs_submission",
            "seeded_sampling",
            "seeded_sampling_submission",
            "toploc",
            "termination",
        }
