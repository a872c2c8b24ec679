"""Times a validator against the sampler whose work it checks, on the same machine; prints JSON.

    python -m benchmarks.validator_speed --in-flight 16 128 [--cache DIR]      # the laptop profile
    python -m benchmarks.validator_speed --in-flight 4 8 32 --layers 8 --hidden 512

For each number of rollouts in flight two sides in turn, round by round, each with one thread for
its arithmetic:
- the sampler: our vLLM engine, seeded, with log-probs and proofs, two leases in flight, a new one
  when one is answered; it neither grades nor packs;
- the validator: the whole of `verify.validator.Validator`, from a queue of signed submissions (up
  to eight at once) to signed verdicts: leases, tables, checks, grading, prefill, proofs. Each
  engine in turn judges what the sampler made in that round.
Groups have 8 samples, or as many as a lease has rollouts. Ratios are of output tokens a second,
medians over the rounds, with the least and the largest; by wall time and by CPU time of all
processes of a side. `stages` says where the validator's CPU time went, in microseconds an output
token, in one more pass. Without a size the model is the laptop profile's after its warm start (kept
in --cache); with one a random Qwen2, which writes to the last token. Load beside it slows both
sides: trust the CPU ratio on a machine that is shared.

`limit` is what FLOPs allow: the peak of a core, as a matrix product of 1024 measures it here, over
the FLOPs that a validator needs for an output token (body over outputs and each group's prompt,
head over the output), against what the sampler reached in CPU time.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

# Read when torch, JAX and vLLM are first imported: a thread for each side's arithmetic.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")

import torch

from benchmarks.one_version import OneVersion
from benchmarks.sampler_engine import Side
from benchmarks.validating.judging import Judge
from benchmarks.validating.run import make_version, spec_for
from benchmarks.validating.sampling import LEASES_IN_FLIGHT, Sampler
from learner_jax.prefill import load_policy as load_jax
from learner_jax.prefill import prefill as prefill_jax
from learner_jax.sharding import make_mesh
from runspec.core import schema
from runspec.core.models.family import load_config
from runspec.core.models.parameters import matrix_parameters
from sampler.engine.engine import Engine
from sampler.prefill import load_policy as load_torch
from sampler.prefill import prefill as prefill_torch
from verify.plugins import load_task_set

GROUP_SIZE = 8


def measure(options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A row for each number of rollouts in flight."""
    spec = spec_for(options, GROUP_SIZE)
    version = make_version(spec, options, folder)
    tasks = load_task_set(spec, version)
    policies = {
        "jax": (prefill_jax, load_jax(version, spec.learner, make_mesh(schema.Mesh()))),
        "torch": (prefill_torch, load_torch(version, spec.learner, torch.device("cpu"))),
    }
    engines = {name: OneVersion(*policies[name], version) for name in options.engines}
    with (
        closing(tasks),
        closing(Engine(spec.samplers[0], probe=False)) as engine,
    ):
        engine.load(version, 0)
        rows = []
        for in_flight in options.in_flight:
            rollouts = in_flight // LEASES_IN_FLIGHT  # of a lease
            size = min(GROUP_SIZE, rollouts)
            own = spec_for(options, size)
            leases = options.waves * LEASES_IN_FLIGHT
            sampler = Sampler(engine, tasks, own, groups=rollouts // size, leases=leases)
            judges = {name: Judge(own, prefill, tasks) for name, prefill in engines.items()}
            row = {"sequences_in_flight": in_flight, "rollouts_a_round": leases * rollouts}
            found = rounds(sampler, judges, engine.pids, options)
            rows.append(row | found | limit(version, found, size, options.dtype))
        return rows


def rounds(
    sampler: Sampler, judges: dict[str, Judge], pids: Sequence[int], options: argparse.Namespace
) -> dict[str, Any]:
    """Both sides in turn, after a round that is not counted."""
    sampler.sample()
    warm = sampler.submissions()
    for judge in judges.values():
        judge.give(warm)
        judge.judge()
    others = children(pids)
    sampling = Side(sampler.sample, pids)
    judging = {name: Side(judge.judge, others) for name, judge in judges.items()}
    for _ in range(options.rounds):
        sampling.round()
        handed = sampler.submissions()
        for name, judge in judges.items():
            judge.give(handed)
            judging[name].round()
    tokens, prompts = sum(h.tokens for h in handed), sum(h.prompts for h in handed)
    row: dict[str, Any] = {
        "tokens": tokens,
        "prompt_tokens": prompts,
        "sampler_tokens_per_s": spread(sampling.wall),
        "sampler_tokens_per_cpu_s": spread(sampling.cpu),
    }
    for name, side in judging.items():
        row[name] = {
            "tokens_per_s": spread(side.wall),
            "tokens_per_cpu_s": spread(side.cpu),
            "ratio": spread(_ratios(side.wall, sampling.wall)),
            "cpu_ratio": spread(_ratios(side.cpu, sampling.cpu)),
            "stages": judges[name].stages(others),
        }
    return row


def limit(version: Path, found: dict[str, Any], group_size: int, dtype: str) -> dict[str, float]:
    """The ratio that FLOPs allow, without attention: a validator that does nothing else."""
    config = load_config(version)
    head = config.vocab_size * config.hidden_size
    body = matrix_parameters(config) - head
    tokens, prompts = found["tokens"], found["prompt_tokens"] / group_size
    flops = 2.0 * (body * (tokens + prompts) + head * tokens) / tokens
    peak = peak_flops(getattr(torch, dtype))
    return {
        "peak_gflops": round(peak / 1e9, 1),
        "mflop_an_output_token": round(flops / 1e6, 3),
        "limit": round(peak / flops / found["sampler_tokens_per_cpu_s"][1], 2),
    }


def peak_flops(dtype: torch.dtype) -> float:
    """FLOP/s of a core, by the best of some matrix products, in CPU time."""
    a, b = (torch.randn(1024, 1024).to(dtype) for _ in range(2))
    best = 0.0
    for _ in range(20):
        begun = time.thread_time()
        a @ b
        best = max(best, 2 * 1024**3 / (time.thread_time() - begun))
    return best


def children(without: Sequence[int]) -> list[int]:
    """Processes below this one, but for some: the graders."""
    tasks = Path("/proc/self/task").iterdir()
    found = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    return sorted(found - set(without))


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True)]


def spread(values: Sequence[float]) -> list[float]:
    """The least, the median, the largest."""
    return [float(f"{value:.4g}") for value in (min(values), median(values), max(values))]


def in_flight(text: str) -> int:
    """Rollouts: two leases, of whole groups."""
    count = int(text)
    rollouts = count // LEASES_IN_FLIGHT
    if count < LEASES_IN_FLIGHT or count % LEASES_IN_FLIGHT or rollouts % min(GROUP_SIZE, rollouts):
        raise argparse.ArgumentTypeError("two leases, each below 8 or a multiple of it")
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=in_flight, nargs="+", default=[16, 128])
    parser.add_argument("--waves", type=int, default=4, help="of so many rollouts, in a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=0, help="0: the laptop profile's model")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--engines", nargs="+", default=["jax", "torch"])
    parser.add_argument("--cache", type=Path, help="where warm starts are kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    print(json.dumps({"benchmark": "validator_speed", "rows": rows}))


if __name__ == "__main__":
    main()
