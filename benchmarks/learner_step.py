"""Times one rollout step of the learner at the laptop's shape; prints JSON.

    python -m benchmarks.learner_step --tokens 128 --rows 4 --fsdp 2

Old log-probs, reference log-probs, and one AdamW update, on random samples of the quickstart's
lengths in groups of eight; `--plain` computes a prompt for each of them. Pin it (`taskset -c 0`)
for numbers of one core. Seconds are CPU seconds of the process, which on one core of an idle
machine are those of the clock. Compilation is timed apart. `dispatch_ms` is the time until JAX has
an update under way; several devices of a CPU make it wait.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

from benchmarks.runs import ROOT
from benchmarks.runs import SPEC as NAME

SPEC = ROOT / NAME


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tokens", 128), ("rows", 4), ("data", 1), ("fsdp", 2), ("tensor", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--plain", action="store_true")
    parser.add_argument(
        "--remat", choices=("none", "dots", "attention", "full", "offload"), default="none"
    )
    options = parser.parse_args()
    devices = options.data * options.fsdp * options.tensor
    os.environ["XLA_FLAGS"] = (
        f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false "
        + os.environ.get("XLA_FLAGS", "")
    )
    print(json.dumps(measure(options)))


def laptop_overrides(options: argparse.Namespace) -> list[str]:
    """What is measured, over the laptop profile."""
    mesh = [f"learner.mesh.{name}={getattr(options, name)}" for name in ("data", "fsdp", "tensor")]
    devices = options.data * options.fsdp * options.tensor
    return [
        *mesh,
        f"learner.hardware.count={devices}",
        f"learner.packing.tokens={options.tokens}",
        f"learner.packing.rows={options.rows}",
        f"learner.remat={options.remat}",
        f"learner.packing.shared_prompts={'false' if options.plain else 'true'}",
        "algorithm.updates_per_step=1",
    ]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import jax
    import numpy as np

    from learner_jax.loss import token_weights
    from learner_jax.model import abstract_params, init_params
    from learner_jax.packing import LossInputs, Sample
    from learner_jax.sharding import make_mesh, shard_batch, shard_params
    from learner_jax.shared_prompts import pack_samples
    from learner_jax.step import build_programs, microbatch_bound
    from learner_jax.warm_start import model_config
    from runspec.core.schema.load import SpecFiles
    from runspec.lint.check import check_spec

    spec = check_spec(
        SpecFiles(SPEC, profile="laptop", overrides=laptop_overrides(options))
    ).require()
    config = model_config(spec)
    mesh = make_mesh(spec.learner.mesh)
    programs = build_programs(spec, config, mesh)
    params = init_params(config, jax.random.key(0))
    state = programs.init_state(shard_params(params, abstract_params(config), mesh))
    reference = programs.publish(state.params)

    rng = np.random.default_rng(0)
    samples = [
        Sample(prompt, rng.integers(0, 192, rng.integers(10, 49)))
        for _ in range(options.sequences // 8)
        for prompt in [rng.integers(0, 192, rng.integers(38, 44))] * 8
    ]
    weights = token_weights([len(s.output) for s in samples], "token", max_new_tokens=48)
    advantages = rng.normal(size=len(samples)).tolist()
    seconds: dict[str, list[float]] = {"pack": [], "old": [], "reference": [], "update": []}
    dispatch: list[float] = []

    for _ in range(options.repeats + 1):
        clock = time.process_time()
        packed = pack_samples(samples, spec, mesh, microbatch_bound(spec))
        tokens = shard_batch(packed.batch, mesh)
        known = [shard_batch(packed.scatter(values), mesh) for values in (weights, advantages)]
        seconds["pack"].append(time.process_time() - clock)

        clock = time.process_time()
        published = programs.publish(state.params)
        old = jax.block_until_ready(programs.score(published, tokens, packed.microbatches))
        seconds["old"].append(time.process_time() - clock)
        clock = time.process_time()
        ref = jax.block_until_ready(programs.score(reference, tokens, packed.microbatches))
        seconds["reference"].append(time.process_time() - clock)

        clock = time.process_time()
        inputs = LossInputs(*known, old, old, ref)
        asked = time.perf_counter()
        total = programs.accumulate(state.params, tokens, inputs, packed.microbatches)
        state, made = programs.apply(state, total)
        dispatch.append(time.perf_counter() - asked)
        jax.block_until_ready((state, made))
        seconds["update"].append(time.process_time() - clock)

    real = sum(len(sample) for sample in samples)
    median = {name: statistics.median(times[1:]) for name, times in seconds.items()}
    step = sum(median.values())
    return {
        "mesh": dict(mesh.shape),
        "packing": {"tokens": options.tokens, "rows": options.rows},
        "microbatches": packed.microbatches,
        "real_tokens": real,
        "filled": round(packed.used / (packed.microbatches * options.rows * options.tokens), 3),
        "compile_seconds": round(sum(t[0] for t in seconds.values()) - step, 2),
        "seconds": {name: round(value, 4) for name, value in median.items()},
        "step_seconds": round(step, 4),
        "real_tokens_per_second": round(real / step),
        "dispatch_ms": round(1000 * statistics.median(dispatch[1:]), 2),
    }


if __name__ == "__main__":
    main()
