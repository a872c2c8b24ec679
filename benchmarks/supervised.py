"""One supervised update, ours beside a plain torch and transformers loop, on this CPU; prints JSON.

    python -m benchmarks.supervised [--quick] [--cases "small,small ragged"]

The same llama weights and documents for every side: cross entropy, backward, clip by norm, AdamW,
in float32 on the same cores. Each side runs in a process of its own, one after another, in rounds.
Tokens are the documents': padding counts for nobody. The first update must give every side the
same loss and gradient norm to 1e-4. `taskset -c 0` measures one core, whose CPU seconds hardly
depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.learner_peers import check_equal, run_side, write_model
from benchmarks.peers.cases import BETAS, CLIP_NORM, LR, SHAPES, Case
from benchmarks.peers.supervised_sides import SIDES

READS = {
    "vocab_size": 1024,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
"""METAGENE-1's laptop shape, with a tied head."""
SHAPES["reads"] = READS
CASES = [
    Case("small", "9M", 64, 256, False, (256, 8), "none"),
    Case("small ragged", "9M", 64, 256, True, (256, 8), "none"),
    Case("reads", "reads", 256, 128, False, (128, 32), "none"),
    Case("reads ragged", "reads", 256, 128, True, (128, 32), "none"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="timed updates of a process")
    parser.add_argument("--quick", action="store_true", help="one timed update of the reads")
    options = parser.parse_args()
    if options.quick:
        options.rounds = options.repeats = 1
        options.cases = "reads,reads ragged"
    names = options.cases.split(",")
    cases = [case for case in CASES if case.name in names]
    print(
        json.dumps({c.name: measure(c, options.rounds, options.repeats) for c in cases}, indent=1)
    )


def measure(case: Case, rounds: int, repeats: int) -> dict[str, Any]:
    """Times the sides of a case."""
    sides = [side for side in SIDES if case.ragged or side != "torch, packed"]
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="runspec-bench-") as temporary:
        folder = Path(temporary)
        write_documents(case, folder)
        write_model({"model_type": "llama", **case.model()}, "LlamaForCausalLM", folder / "model")
        command = [sys.executable, "-m", "benchmarks.peers.supervised_sides", str(folder)]
        for _ in range(rounds):
            for side in sides:
                runs[side].append(run_side([*command, str(repeats), side]))
    check_equal(case, {side: found[0]["first"] for side, found in runs.items()})
    tokens = int(case.lengths().sum())
    report: dict[str, Any] = {"documents": case.sequences, "tokens": tokens}
    for side, found in runs.items():
        seconds = statistics.median(s for each in found for s in each["seconds"])
        cpu_seconds = statistics.median(s for each in found for s in each["cpu_seconds"])
        report[side] = {
            "tokens_per_second": round(tokens / seconds),
            "tokens_per_cpu_second": round(tokens / cpu_seconds),
            "seconds": round(seconds, 3),
            "compile_s": round(min(each["compile_s"] for each in found), 2),
            "peak_rss_gb": round(max(each["peak_rss_gb"] for each in found), 2),
            **found[0]["first"],
        }
    for unit in ("second", "cpu_second"):
        name = f"tokens_per_{unit}"
        report[f"ours over others, {name}"] = {
            side: round(report["ours"][name] / report[side][name], 3) for side in sides[1:]
        }
    return report


def write_documents(case: Case, folder: Path) -> None:
    """`case.json` with all settings, `batch.npz` with the documents' tokens end to end."""
    rng, lengths = np.random.default_rng(11), case.lengths()
    vocab = SHAPES[case.shape]["vocab_size"]
    tokens = rng.integers(2, vocab, int(lengths.sum())).astype(np.int32)
    np.savez(folder / "batch.npz", tokens=tokens, lengths=lengths)
    settings = {"lr": LR, "betas": BETAS, "clip_norm": CLIP_NORM}
    settings |= {"model": {"model_type": "llama", **case.model()}, "case": asdict(case)}
    (folder / "case.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    main()
