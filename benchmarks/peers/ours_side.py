"""Our side of `benchmarks.learner_peers`: `training.train_step`, as the learner calls it.

python -m benchmarks.peers.ours_side FOLDER REPEATS
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from benchmarks.peers.side import Step, run_side
from runspec.local.machine import jax_environment

DEVICES = 2
"""A virtual device a core, as the local backend makes them of a CPU's mesh: what is no matrix
product then runs on both cores too."""


def spec_of(settings: dict[str, Any]) -> Any:
    """The run spec that a person would write for this batch."""
    from runspec.core.schema import RunSpec

    case, shape = settings["case"], dict(settings["model"])
    context = shape.pop("max_position_embeddings")
    tokens, rows = case["packing"]
    pool = {
        "name": "local",
        "hardware": {"kind": "cpu"},
        "max_model_len": case["tokens"],
        "max_new_tokens": case["tokens"],
    }
    return RunSpec.model_validate(
        {
            "version": "runspec/v1",
            "name": "benchmark",
            "seed": 0,
            "steps": 1000,
            "model": {"shape": {"model_type": "qwen2", **shape}, "max_context": context},
            "data": {"max_prompt_tokens": context, "sources": [{"name": "none", "kind": "none"}]},
            "algorithm": {
                "prompts_per_step": case["sequences"] // settings["group_size"],
                "group_size": settings["group_size"],
                "updates_per_step": 1,
                "clip": {
                    "eps_low": settings["epsilon"],
                    "eps_high": settings["epsilon"],
                    "delta": None,
                },
                "kl": {"coef": 0.0},
                "entropy_coef": 0.0,
            },
            "optimizer": {
                "lr": settings["lr"],
                "betas": settings["betas"],
                "clip_norm": settings["clip_norm"],
            },
            "reward": [{"name": "none", "kind": "none"}],
            "learner": {
                "hardware": {"kind": "cpu", "count": DEVICES},
                "mesh": {"data": DEVICES},
                "packing": {"tokens": tokens, "rows": rows},
                "remat": case["remat"],
                "compute_dtype": "float32",
            },
            "samplers": [pool],
            "broadcast": {"dtype": "float32"},
        }
    )


def make_step(folder: Path, settings: dict[str, Any], arrays: dict[str, Any]) -> Step:
    # Before JAX is imported.
    os.environ |= jax_environment(os.environ, on_cpu=True, devices=DEVICES)
    import numpy as np

    from learner_jax.batch import Batch, TrainingRollout
    from learner_jax.leaves import load_params
    from learner_jax.sharding import make_mesh
    from learner_jax.step import build_programs
    from learner_jax.training import train_step
    from runspec.core.models.family import load_config
    from verify.formats.batch import BatchGroup, BatchManifest

    spec, config = spec_of(settings), load_config(folder / "model")
    mesh = make_mesh(spec.learner.mesh)
    programs = build_programs(spec, config, mesh)
    state = programs.init_state(load_params(folder / "model", config, mesh))
    size, outputs = settings["group_size"], arrays["mask"].sum(axis=1)
    rollouts = [
        TrainingRollout(
            problem_id=str(i),
            prompt_tokens=arrays["prompt"][i],
            output_tokens=arrays["completion"][i, :n],
            mu=np.zeros(n, np.float32),
            advantage=float(arrays["advantages"][i]),
            task_reward=0.0,
            reward=0.0,
            target=None,
            version=0,
        )
        for i, n in enumerate(outputs.tolist())
    ]
    groups = [rollouts[i : i + size] for i in range(0, len(rollouts), size)]
    named = [BatchGroup("0", "0", number, 0, 0) for number in range(len(groups))]
    batch = Batch(BatchManifest(spec.name, 0, named, True, {}, 1, "0" * 64), groups)

    def step() -> tuple[float, float]:
        nonlocal state
        # The version's bits are the masters' own: both are float32 here.
        result = train_step(
            spec, mesh, programs, state, published=state.params, reference=None, batch=batch
        )
        state = result.state
        return result.numbers["loss"], result.numbers["grad_norm"]

    return step


if __name__ == "__main__":
    run_side("ours", make_step)
