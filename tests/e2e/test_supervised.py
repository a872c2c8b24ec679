"""A pretraining run as a user starts it: its learner is killed, and the run goes on."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.harness import LiveRun, runspec

pytestmark = pytest.mark.slow

STEPS = 12
SPEC = """
    version: runspec/v1
    name: reads
    seed: 3
    steps: 12
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
      held_out: {tokens: 400, every: 4}
    optimizer: {lr: 1e-2, warmup_updates: 2, schedule: cosine, decay_updates: 22, final_lr: 1e-3}
    learner:
      hardware: {kind: cpu, count: 2}
      mesh: {fsdp: 2}
      packing: {tokens: 64, rows: 4}
      compute_dtype: float32
    broadcast: {dtype: float32}
    checkpoints: {every: 4}
    budget: {max_hours: 1}
"""


class Reads(LiveRun):
    """A run of the spec above, beside its files."""

    @property
    def words(self) -> list[str]:
        cache = self.runs_dir.parent / ".cache" / "learner"
        spec = str(self.runs_dir / "spec.yaml")
        sets = ["--set", f"name={self.name}", "--set", f"learner.compile_cache={cache}"]
        return [spec, "--runs-dir", str(self.runs_dir), *sets]


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
    (folder / "spec.yaml").write_text(dedent(SPEC))
    python_module(
        *("learner_jax", "tokenizer", "train", folder / "reads.fa", "--scheme", "nucleotides"),
        *("--vocab", "64", "-o", folder / "tokenizer"),
    )


def python_module(*words: str | Path) -> None:
    command = [sys.executable, "-m", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def finished(runs_dir: Path) -> Reads:
    # given reads, a tokenizer and a spec without samplers
    write_files(runs_dir)
    with Reads(runs_dir, "reads") as run:
        # when the learner is killed in the middle
        run.wait_for_step(6)
        learner = run.pids()["learner"]
        assert learner is not None
        os.kill(learner, signal.SIGKILL)
        run.finish()
    return run


def test_every_step_is_trained_once_and_the_loss_falls(finished: Reads):
    rows = finished.metrics()
    assert [row["step"] for row in rows] == list(range(STEPS))
    assert [(row["first_row"], row["last_row"]) for row in rows] == [
        (16 * step, 16 * step + 16) for step in range(STEPS)
    ]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.3
    held_out = [row["held_out_bits_per_byte"] for row in rows]
    assert [at for at, bits in enumerate(held_out) if bits is not None] == [3, 7, 11]
    assert held_out[11] < held_out[3]
    assert rows[-1]["waits"].get("input", 0.0) < 0.5


def test_versions_are_published_at_their_steps_and_the_record_holds(finished: Reads):
    log = (finished.dir / "logs" / "publisher.log").read_text()
    published = [v for v in range(STEPS + 1) if f"version {v} published" in log]
    assert published == [0, 3, 6, 9, 12]
    python_module("verify", "audit", finished.dir)


def test_its_status_and_report_tell_the_loss(finished: Reads):
    told = runspec("status", finished.dir, "--json", timeout_s=60)
    assert told.returncode == 0, told.stderr
    conditions = {each["type"]: each["status"] for each in json.loads(told.stdout)["conditions"]}
    assert conditions["Finished"] == "True"
    assert "Held-out" in (finished.dir / "report.html").read_text()
    summary = json.loads((finished.dir / "summary.json").read_text())
    assert summary["steps"] == STEPS
