"""One full GRPO update, ours beside TRL's and Tunix's, on this machine's CPU; prints JSON.

    RUNSPEC_PEERS=DIR python -m benchmarks.learner_peers [--quick] [--cases small,large]

The same Qwen2 weights and batch for every side; old log-probs, loss, backward, clip by norm, AdamW,
all in float32 on the same cores. Each side runs in a process of its own, one after another, in
rounds. Tokens are real ones: padding counts for nobody. A side that is not installed is left out.
The first update must give every side the same loss and gradient norm to 1e-4.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.peers import HERE, python_of
from benchmarks.peers.cases import CASES, Case, write_case
from benchmarks.runs import ROOT

CORES = 2


def commands() -> dict[str, list[str]]:
    """How each side that is here is started."""
    found = {"ours": [sys.executable, "-m", "benchmarks.peers.ours_side"]}
    for peer in ("tunix", "trl"):
        python = python_of(peer)
        if python is not None:
            found[peer] = [str(python), str(HERE / f"{peer}_side.py")]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(case.name for case in CASES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="timed updates of a process")
    parser.add_argument("--quick", action="store_true", help="one timed update of the small cases")
    options = parser.parse_args()
    if options.quick:
        options.rounds = options.repeats = 1
        options.cases = "small,small ragged"
    names = options.cases.split(",")
    cases = [case for case in CASES if case.name in names]
    print(
        json.dumps({c.name: measure(c, options.rounds, options.repeats) for c in cases}, indent=1)
    )


def measure(case: Case, rounds: int, repeats: int) -> dict[str, Any]:
    sides = commands()
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory(prefix="runspec-bench-") as temporary:
        folder = Path(temporary)
        write_case(case, folder)
        write_model({"model_type": "qwen2", **case.model()}, "Qwen2ForCausalLM", folder / "model")
        for _ in range(rounds):
            for side, command in sides.items():
                runs[side].append(run_side([*command, str(folder), str(repeats)]))
    check_equal(case, {side: found[0]["first"] for side, found in runs.items()})
    tokens = int(case.lengths().sum())
    report: dict[str, Any] = {
        "tokens": tokens,
        "padded_tokens": case.sequences * int(case.lengths().max()),
        "matmul_tflop": round(case.matmul_flops() / 1e12, 3),
        "packing": case.packing,
        "remat": case.remat,
    }
    for side, found in runs.items():
        seconds, cpu = (
            statistics.median(s for each in found for s in each[name])
            for name in ("seconds", "cpu_seconds")
        )
        report[side] = {
            "tokens_per_second": round(tokens / seconds, 1),
            "seconds": round(seconds, 3),
            "cpu_seconds": round(cpu, 3),
            "gflops": round(case.matmul_flops() / seconds / 1e9, 1),
            "compile_s": round(min(each["compile_s"] for each in found), 2),
            "peak_rss_gb": round(max(each["peak_rss_gb"] for each in found), 2),
            **found[0]["first"],
        }
    ours = report["ours"]["tokens_per_second"]
    report["ratio"] = {
        side: round(ours / report[side]["tokens_per_second"], 3) for side in sides if side != "ours"
    }
    return report


def write_model(model: dict[str, Any], architecture: str, folder: Path) -> None:
    """Random weights as a Hugging Face directory, by a process that ends: JAX holds its memory."""
    folder.mkdir()
    config = {"architectures": [architecture], "eos_token_id": 1, "pad_token_id": 0}
    config |= {"torch_dtype": "float32", "hidden_act": "silu", **model}
    (folder / "config.json").write_text(json.dumps(config))
    code = (
        "import jax, sys, pathlib; from runspec.core.models.family import load_config;"
        "from learner_jax.leaves import save_weights; from learner_jax.model import init_params;"
        "folder = pathlib.Path(sys.argv[1]); config = load_config(folder);"
        "save_weights(init_params(config, jax.random.key(0)), config, folder)"
    )
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, cwd=ROOT, env=cpu())


def run_side(command: list[str]) -> dict[str, Any]:
    cores = sorted(os.sched_getaffinity(0))[:CORES]
    done = subprocess.run(
        command,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=cpu(),
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    )
    return json.loads(done.stdout.splitlines()[-1])


def cpu() -> dict[str, str]:
    """The environment of every side: CPU only, as many threads as cores."""
    threads = min(CORES, len(os.sched_getaffinity(0)))
    return {**os.environ, "JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": str(threads)}


def check_equal(case: Case, first: dict[str, dict[str, float]]) -> None:
    for side, found in first.items():
        for name, value in found.items():
            expected = first["ours"][name]
            if abs(value - expected) > 1e-4 * max(abs(expected), 0.1):
                raise SystemExit(
                    f"{case.name}: {name} of the first update is {expected} here, {value} by {side}"
                )


if __name__ == "__main__":
    main()
