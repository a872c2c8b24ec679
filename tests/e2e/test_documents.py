"""Pretraining with two islands of unlike meshes; one is killed, and the run goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from runspec.core.run_files import BESIDE_NAME, island_folder, numbered
from tests.harness import LiveRun, runspec, standing_still

pytestmark = pytest.mark.slow

STEPS = 24
SPEC = """
version: runspec/v1
name: reads
seed: 3
steps: 24
model:
  max_context: 64
  tokenizer: {hf: tokenizer}
  shape:
    model_type: llama
    vocab_size: 64
    hidden_size: 32
    intermediate_size: 64
    num_hidden_layers: 2
    num_attention_heads: 2
    num_key_value_heads: 2
data:
  sources:
    - {name: reads, kind: fasta, uri: reads.fa}
algorithm:
  kind: pretrain
  tokens_per_update: 512
  updates_per_step: 2
  publish_every: 3
  z_loss: {kind: max_logit, coef: 2e-4}
  held_out: {tokens: 400, every: 8}
optimizer: {lr: 1e-2, warmup_updates: 2, schedule: cosine, decay_updates: 46, final_lr: 1e-3}
learner:
  hardware: {kind: cpu, count: 2}
  mesh: {fsdp: 2}
  packing: {tokens: 64, rows: 4}
  compute_dtype: float32
  islands:
    members: [{name: a}, {name: b, hardware: {kind: cpu, count: 1}, mesh: {fsdp: 1}}]
    overlap: 1
broadcast: {dtype: float32}
checkpoints: {every: 6}
budget: {max_hours: 1}
"""


class Reads(LiveRun):
    """A run of the spec above, beside its files."""

    @property
    def words(self) -> list[str]:
        spec = str(self.runs_dir / "spec.yaml")
        return [spec, "--runs-dir", str(self.runs_dir), "--set", self.compile_cache]


def write_files(folder: Path) -> None:
    """Two hundred reads of two organisms, a tokenizer trained on them, and the spec."""
    draw = random.Random(5)
    organisms = ["".join(draw.choices("ACGT", k=600)) for _ in range(2)]
    reads = []
    for number in range(200):
        organism, length = draw.choice(organisms), draw.randrange(40, 120)
        start = draw.randrange(len(organism) - length)
        reads.append(f">read{number}\n{organism[start : start + length]}\n")
    (folder / "reads.fa").write_text("".join(reads))
    (folder / "spec.yaml").write_text(SPEC)
    python_module(
        *("learner_jax", "tokenizer", "train", folder / "reads.fa", "--scheme", "nucleotides"),
        *("--vocab", "64", "-o", folder / "tokenizer"),
    )


def python_module(*words: str | Path) -> None:
    command = [sys.executable, "-m", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def finished(runs_dir: Path) -> Reads:
    # given two islands that overlap steps
    write_files(runs_dir)
    killed = False
    while not killed:  # once more where the run ended before that
        runspec("delete", "reads", "--runs-dir", runs_dir, "--yes")
        with Reads(runs_dir, "reads") as run:
            # when the second is killed in the middle, while the first cannot end the run
            run.wait_for_step(3)
            pids = run.pids()
            with suppress(ProcessLookupError, TypeError), standing_still(pids["learner"]):
                if killed := len(run.metrics()) < STEPS - 3:
                    os.kill(pids["island-b"], signal.SIGKILL)
            run.finish()
    return run


def test_every_step_is_trained_once_by_both_islands_and_the_loss_falls(finished: Reads) -> None:
    rows = finished.metrics()
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert [(row["first_row"], row["last_row"]) for row in rows] == [
        (16 * step, 16 * step + 16) for step in range(STEPS)
    ]
    commits = [row["islands"] for row in rows if row["islands"] is not None]
    assert {tuple(each["contributors"]) for each in commits} == {("a", "b")}
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    held_out = [row["held_out_bits_per_byte"] for row in rows]
    # an overlapping step shows the outer parameters of the step before
    assert [at for at, bits in enumerate(held_out) if bits is not None] == [8, 16, 23]
    assert max(filter(None, held_out)) < 2.0, "as good as a guess among four bases"


def test_both_islands_end_with_the_same_outer_parameters(finished: Reads) -> None:
    ends = []
    for folder in (finished.dir, island_folder(finished.dir, "island-b")):
        states = folder / "checkpoints" / "state"
        newest = states / f"step_{numbered(states, 'step_')[-1]}" / BESIDE_NAME
        assert np.load(newest / "version.npy") == [STEPS]
        ends.append([np.load(newest / f"{name}.npy") for name in ("theta", "momentum")])
    for a, b in zip(*ends, strict=True):
        np.testing.assert_array_equal(a, b)
        assert np.abs(a).max() > 0
    # and the documents were encoded once for both
    caches = [path.parent for path in finished.runs_dir.parent.rglob(".cache/corpus")]
    assert caches == [finished.runs_dir.parent / ".cache"]


def test_versions_are_published_at_their_steps_and_the_record_holds(finished: Reads) -> None:
    log = (finished.dir / "logs" / "publisher.log").read_text()
    published = [v for v in range(STEPS + 1) if f"version {v} published" in log]
    assert published == list(range(0, STEPS + 1, 3))
    python_module("verify", "audit", finished.dir)


def test_status_summary_and_report_tell_of_the_loss_and_the_exchange(finished: Reads) -> None:
    shown = runspec("status", finished.dir, "--json")
    assert shown.returncode == 0, shown.stderr
    status = json.loads(shown.stdout)
    conditions = {each["type"]: each["status"] for each in status["conditions"]}
    assert conditions["Finished"] == "True"
    assert status["islands"]["contributors"] == ["a", "b"]
    assert status["roles"]["island-b"]["restarts"] == 1
    summary = json.loads((finished.dir / "summary.json").read_text())
    assert (summary["steps"], summary["islands"]["dropped"]) == (STEPS, {})
    received, sent = (summary["islands"][f"{way}_bytes"] for way in ("received", "sent"))
    assert received > 0 and sent >= 2 * received
    assert "Held-out" in (finished.dir / "report.html").read_text()
