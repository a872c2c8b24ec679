"""Times a learner's update with prompts computed once for a group, and once for each sample.

    python -m benchmarks.shared_prompts

Old log-probs and the gradient of one update, of a random model. Both sides take turns in one
process; CPU seconds of the process, medians. The limit of the ratio is that of tokens to positions,
which all but attention and the head follow.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from benchmarks.runs import ROOT, SPEC
from learner_jax.loss import token_weights
from learner_jax.model import abstract_params, init_params
from learner_jax.packing import LossInputs, Sample
from learner_jax.sharding import make_mesh, shard_batch, shard_params
from learner_jax.shared_prompts import pack_samples
from learner_jax.step import build_programs, microbatch_bound
from runspec.core.models import ModelConfig
from runspec.core.schema import Mesh, RunSpec
from runspec.core.schema.load import SpecFiles
from runspec.lint.check import check_spec


@dataclass(frozen=True)
class Case:
    """Groups of equal samples, and a model."""

    prompt: int
    output: int
    group: int
    groups: int
    hidden: int
    layers: int
    rows: int
    """Of a microbatch."""


CASES = {
    "44 + 8 x 26, hidden 64": Case(44, 26, 8, 16, 64, 3, 8),
    "256 + 8 x 228, hidden 256": Case(256, 228, 8, 4, 256, 4, 8),
    "1024 + 16 x 1024, hidden 512": Case(1024, 1024, 16, 1, 512, 2, 10),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    for name, case in CASES.items():
        print(json.dumps({name: measure(case, repeats)}), flush=True)


def spec_of(case: Case, *, shared: bool) -> RunSpec:
    """The laptop's spec with the case's sizes."""
    length = case.prompt + case.output
    sizes = {
        "learner.packing": f"{{tokens: {length}, rows: {case.rows}, shared_prompts: {shared}}}",
        "data.max_prompt_tokens": case.prompt,
        "samplers.volunteers.max_model_len": length,
        "samplers.volunteers.max_new_tokens": case.output,
        "model.max_context": length,
        "algorithm.prompts_per_step": case.groups,
        "algorithm.group_size": case.group,
        "algorithm.updates_per_step": 1,
        "reward.length": "null",
    }
    overrides = [f"{path}={value}".replace("False", "false") for path, value in sizes.items()]
    files = SpecFiles(ROOT / SPEC, profile="laptop", overrides=overrides)
    spec = check_spec(files).require()
    learner = spec.learner.model_copy(update={"mesh": Mesh()})
    return spec.model_copy(update={"learner": learner})


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """Return CPU seconds and positions of both sides, and their ratios."""
    heads = max(2, case.hidden // 64)
    shape = (case.hidden, 3 * case.hidden, case.layers, heads, heads // 2, case.hidden // heads)
    context = case.prompt + case.output
    config = ModelConfig("qwen2", 192, *shape, context, 1e4, 1e-6, tie_word_embeddings=False)
    rng = np.random.default_rng(0)
    samples = [
        Sample(prompt, rng.integers(0, 192, case.output))
        for _ in range(case.groups)
        for prompt in [rng.integers(0, 192, case.prompt)] * case.group
    ]
    count = len(samples)
    weights = token_weights([case.output] * count, "token", max_new_tokens=case.output)
    sides, seconds, positions = {}, dict[str, list[float]](), {}
    for name in ("plain", "shared"):
        spec = spec_of(case, shared=name == "shared")
        mesh = make_mesh(spec.learner.mesh)
        programs = build_programs(spec, config, mesh)
        params = shard_params(init_params(config, jax.random.key(0)), abstract_params(config), mesh)
        sides[name] = spec, mesh, programs, params
    for turn in range(repeats + 1):
        for name, (spec, mesh, programs, params) in sides.items():
            began = time.process_time()
            packed = pack_samples(samples, spec, mesh, microbatch_bound(spec))
            values = [packed.scatter(each) for each in (weights, rng.normal(size=count).tolist())]
            tokens, (on, advantages) = shard_batch((packed.batch, values), mesh)
            old = programs.score(params, tokens, packed.microbatches)
            inputs = LossInputs(on, advantages, old, old, old)
            jax.block_until_ready(programs.accumulate(params, tokens, inputs, packed.microbatches))
            if turn:  # the first one compiles
                seconds.setdefault(name, []).append(time.process_time() - began)
            positions[name] = packed.used, packed.microbatches * tokens.tokens[0].size
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    return {
        "cpu_s": {name: round(value, 3) for name, value in medians.items()},
        "positions, with padding": positions,
        "limit": round(positions["plain"][0] / positions["shared"][0], 2),
        "times faster": round(medians["plain"] / medians["shared"], 2),
    }


if __name__ == "__main__":
    main()
