"""A tiny model of one's own learns two-digit sums: `sft` on 500, then GRPO on 3,500 others.

A file of 4,000 of the 10,000 sums has the worked carries of each, and single digits as tokens. The
`sft` run goes on until the model, sampled at temperature 1, is right on .3 to .4 of 500 sums that
are in no file; then a GRPO run starts from its newest version. Three seeds.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import yaml

SEEDS = tuple(int(seed) for seed in os.environ.get("SUMS_SEEDS", "0,1,2").split(","))
DIGITS = range(100)
SUMS, SUPERVISED, HELD_OUT = 4000, 500, 500
"""Sums of the file, the first of them for `sft`, and sums that are in no file."""
ACCURACY = (0.3, 0.4)
"""Held-out accuracy at which `sft` ends."""
UPDATES, FIRST, LAST = 10, 20, 60
"""Updates of a step of `sft`, steps before the first look at the accuracy, steps at most."""
GRPO_STEPS = 100
LEARNER = {
    "hardware": {"kind": "cpu", "count": 2},
    "mesh": {"fsdp": 2},
    "packing": {"tokens": 128, "rows": 16},
    "remat": "none",
    "compute_dtype": "float32",
}
TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}<|eos|>{% endgeneration %}"
    "{% else %}<|bos|>{{ message.content }}{% endif %}{% endfor %}"
)
VOCABULARY = 264
"""Three special tokens, 256 bytes, and the merges that make `</` and `think`."""


def worked(a: int, b: int) -> str:
    """Return ones, tens with the carry, and the answer: 37 + 48 is `7+8=15;3+4+1=8</think>85`."""
    ones = a % 10 + b % 10
    tens = a // 10 + b // 10 + ones // 10
    carried = f"{a % 10}+{b % 10}={ones:02};{a // 10}+{b // 10}+{ones // 10}={tens}"
    return f"{carried}</think>{a + b}"


def row(a: int, b: int) -> dict[str, Any]:
    """Return a sum as a problem and as a conversation."""
    prompt = f"{a}+{b}="
    return {
        "problem_id": f"{a}+{b}",
        "task_type": "math",
        "prompt": prompt,
        "verification_info": {"ground_truth": str(a + b)},
        "messages": [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": worked(a, b)},
        ],
    }


def write_files(folder: Path, seed: int) -> None:
    """Write data, tokenizer and specs.

    Args:
        folder: exists; gets `sft.jsonl`, `problems.jsonl` and `held_out.jsonl`, which share no sum,
            `tokenizer/`, and the specs of both runs and of a look at the accuracy.
        seed: of the data and of the runs.
    """
    pairs = [(a, b) for a in DIGITS for b in DIGITS]
    random.Random(seed).shuffle(pairs)
    rows = [row(a, b) for a, b in pairs[: SUMS + HELD_OUT]]
    for name, some in (
        ("sft", rows[:SUPERVISED]),
        ("problems", rows[SUPERVISED:SUMS]),
        ("held_out", rows[SUMS:]),
    ):
        text = "".join(json.dumps(each) + "\n" for each in some)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    texts = folder / "worked.txt"
    texts.write_text("\n".join(worked(a, b) for a, b in pairs[:SUMS]), encoding="utf-8")
    words = ["learner_jax", "tokenizer", "train", str(texts), "--vocab", str(VOCABULARY)]
    command(*words, "-o", str(folder / "tokenizer"))
    (folder / "tokenizer" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    for name, spec in specs(folder, seed).items():
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(spec), encoding="utf-8")


def specs(folder: Path, seed: int) -> dict[str, dict[str, Any]]:
    """Return the specs by their file's name."""
    shape = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 192,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    tokenizer = {"hf": str(folder / "tokenizer")}
    common = {"version": "runspec/v1", "seed": seed, "broadcast": {"dtype": "float32"}}
    sft = {
        **common,
        "name": "sums-sft",
        "steps": FIRST,
        "model": {"max_context": 128, "shape": shape, "tokenizer": tokenizer},
        "data": {"sources": [{"name": "sums", "kind": "jsonl", "uri": "sft.jsonl"}]},
        "algorithm": {
            "kind": "sft",
            "updates_per_step": UPDATES,
            "tokens_per_update": 2048,
            "held_out": {"tokens": 0},
        },
        "optimizer": {"lr": 3e-3, "betas": [0.9, 0.98], "warmup_updates": 20},
        "learner": LEARNER,
        "checkpoints": {"every": 1, "keep": 2},
    }
    sft["data"]["sources"][0]["params"] = {"messages": "messages"}
    grpo = {
        **common,
        "name": "sums-grpo",
        "steps": GRPO_STEPS,
        "model": {"max_context": 128, "hf": str(folder / "model")},
        "data": {
            "max_prompt_tokens": 16,
            "sources": [{"name": "problems", "kind": "jsonl", "uri": "problems.jsonl"}],
        },
        "algorithm": {
            "prompts_per_step": 32,
            "group_size": 8,
            "updates_per_step": 1,
            "async_level": 2,
            "advantage": {"normalize": "none"},
            "loss_normalizer": "token",
            "old_logprobs": "sampler",
        },
        "optimizer": {"lr": 5e-4, "clip_norm": 0.5, "warmup_updates": 10},
        "reward": [{"name": "math", "kind": "math"}],
        "learner": LEARNER,
        "samplers": [
            {
                "name": "volunteers",
                "trust": "untrusted",
                "hardware": {"kind": "cpu", "count": 1},
                "dtype": "float32",
                "max_model_len": 56,
                "max_new_tokens": 32,
                "groups_per_submission": 8,
            }
        ],
        "verify": {"validators": 1, "lease_timeout": "60s"},
        "checkpoints": {"every": 20, "keep": 2},
    }
    grpo["broadcast"] = {
        "dtype": "float32",
        "chunk_bytes": 131072,
        "relays": [{"name": "local", "upstream": ["origin"]}],
    }
    held_out = {**grpo, "name": "sums-held-out"}
    held_out["data"] = {
        "max_prompt_tokens": 16,
        "sources": [{"name": "held-out", "kind": "jsonl", "uri": "held_out.jsonl"}],
    }
    return {"sft": sft, "grpo": grpo, "held_out": held_out}


def command(*words: str) -> None:
    """Run `python -m WORDS`; its output goes to standard error."""
    print("+", *words, file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", *words], check=True, stdout=sys.stderr)


def apply(folder: Path, name: str, steps: int) -> float:
    """Apply a spec of the folder up to a number of steps; return the seconds that it took."""
    begun = time.monotonic()
    spec, runs = str(folder / f"{name}.yaml"), str(folder / "runs")
    command("runspec", "apply", spec, "--runs-dir", runs, "--set", f"steps={steps}")
    return time.monotonic() - begun


def trained(folder: Path, run: str, steps: int) -> Path:
    """Return the Hugging Face directory of the version after so many steps."""
    return folder / "runs" / run / "weights" / f"v{steps}"


def accuracy(folder: Path, model: Path, samples: int = 4) -> float:
    """Return the share of right samples on the held-out sums, at temperature 1."""
    out = folder / "rates.parquet"
    out.unlink(missing_ok=True)
    words = ["sampler", "solve-rates", str(folder / "held_out.yaml"), "--source", "held-out"]
    words += ["--model", str(model), "--samples", str(samples), "--field", "rate"]
    command(*words, "--out", str(out))
    rates = pyarrow.parquet.read_table(out)["rate"].to_pylist()
    if len(rates) != HELD_OUT or None in rates:
        raise RuntimeError(f"{len(rates)} of {HELD_OUT} sums were tried and graded")
    return sum(rates) / len(rates)


def supervised(folder: Path) -> tuple[float, int, float]:
    """Train by `sft` until the held-out accuracy is within `ACCURACY`; `model/` is the result.

    Returns:
        The accuracy, the steps, and the seconds of the runs.

    Raises:
        RuntimeError: the accuracy never is.
    """
    seconds = 0.0
    for steps in range(FIRST, LAST + 1):
        seconds += apply(folder, "sft", steps)
        found = accuracy(folder, trained(folder, "sums-sft", steps))
        print(f"sft, {steps} steps: {found:.3f}", file=sys.stderr, flush=True)
        if found >= ACCURACY[0]:
            break
    if not ACCURACY[0] <= found <= ACCURACY[1]:
        raise RuntimeError(f"accuracy {found:.3f} after {steps} steps of sft")
    shutil.copytree(trained(folder, "sums-sft", steps), folder / "model")
    return found, steps, seconds


def seeds() -> Iterator[tuple[str, dict[str, object]]]:
    """Yield the figures of each seed."""
    for seed in SEEDS:
        with tempfile.TemporaryDirectory(prefix="runspec-sums-") as temporary:
            folder = Path(temporary)
            write_files(folder, seed)
            before, steps, sft_s = supervised(folder)
            grpo_s = apply(folder, "grpo", GRPO_STEPS)
            after = accuracy(folder, trained(folder, "sums-grpo", GRPO_STEPS))
        yield (
            f"seed {seed}",
            {
                "sft updates": steps * UPDATES,
                "accuracy after sft": round(before, 3),
                "after GRPO": round(after, 3),
                "steps": GRPO_STEPS,
                "seconds of sft": round(sft_s),
                "seconds of GRPO": round(grpo_s),
            },
        )


def run() -> dict[str, dict[str, object]]:
    """Run every seed.

    Returns:
        The figures of each.
    """
    return dict(seeds())
