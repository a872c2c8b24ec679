"""The learner's full update of one batch: pi_old, the gradient, its clip and AdamW.

python -m benchmarks.accelerator.update --shape tiny --layers 2 --tokens 256 ...
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from benchmarks.accelerator.case import (
    DELTA,
    ENTROPY,
    EPS_HIGH,
    EPS_LOW,
    PROMPT,
    SAMPLES,
    SETTINGS,
    Case,
    side_arguments,
)
from learner_jax.leaves import save_weights
from learner_jax.loss import token_weights
from learner_jax.model import abstract_params, init_params
from learner_jax.packing import LossInputs, Sample, TokenBatch, pack
from learner_jax.recipes import peak_flops
from learner_jax.sharding import make_mesh, shard_batch, shard_params
from learner_jax.step import Accumulated, Programs, TrainState, build_programs, microbatch_bound
from runspec.core.models import ModelConfig
from runspec.core.models.family import parse_config
from runspec.core.models.parameters import useful_flops
from runspec.core.schema import RunSpec


def run_spec(case: Case, devices: int = 1, rows: int = 1) -> RunSpec:
    """The run that a person would write for this batch on some GPUs."""
    longest = max(case.lengths)
    pool = {
        "name": "local",
        "hardware": {"kind": "any"},
        "max_model_len": longest,
        "max_new_tokens": longest,
    }
    clip = {"eps_low": EPS_LOW, "eps_high": EPS_HIGH, "delta": DELTA}
    algorithm = {
        "prompts_per_step": 1,
        "group_size": SAMPLES,
        "updates_per_step": 1,
        "clip": clip,
        "kl": {"coef": 0.0},
        "entropy_coef": ENTROPY,
        "loss_normalizer": "token",
    }
    learner = {
        "hardware": {"kind": "any", "count": devices},
        "mesh": {"fsdp": devices},
        "packing": {"tokens": case.tokens, "rows": rows},
        "remat": case.remat,
        "attention": case.attention,
        "compute_dtype": case.dtype,
    }
    return RunSpec.model_validate(
        {
            "version": "runspec/v1",
            "name": "gpu-learner",
            "seed": 0,
            "steps": 1,
            "model": {"hf": "random/weights", "max_context": case.tokens},
            "data": {"max_prompt_tokens": 1, "sources": [{"name": "none", "kind": "none"}]},
            "algorithm": algorithm,
            "optimizer": SETTINGS,
            "reward": [{"name": "none", "kind": "none"}],
            "learner": learner,
            "samplers": [pool],
            "broadcast": {"dtype": case.dtype},
        }
    )


@dataclass
class Prepared:
    """A case on the device, before its first update."""

    config: ModelConfig
    programs: Programs
    state: TrainState
    tokens: TokenBatch
    on_mesh: Any
    """Weights of the loss, and in `advantage` the advantages, [M, rows, tokens]."""
    advantage: Any
    microbatches: int

    def old_logprobs(self) -> jax.Array:
        """pi_old, by the published weights."""
        published = self.programs.publish(self.state.params)
        return self.programs.score(published, self.tokens, self.microbatches)

    def accumulate(self, old: jax.Array) -> Accumulated:
        """The gradient."""
        inputs = LossInputs(self.on_mesh, self.advantage, old, old, None)
        return self.programs.accumulate(self.state.params, self.tokens, inputs, self.microbatches)


def prepare(
    case: Case, weights: Path | None = None, *, devices: Sequence[Any] = (), rows: int = 1
) -> Prepared:
    """Random weights, which `weights` then holds for another side, and the batch.

    Args:
        case: what is computed.
        weights: a folder.
        devices: of the mesh; by default the first.
        rows: of a microbatch, of which all but the first are empty.
    """
    spec, config = (
        run_spec(case, len(devices) or 1, rows),
        parse_config(case.config(), place="case"),
    )
    mesh = make_mesh(spec.learner.mesh, devices or None)
    programs = build_programs(spec, config, mesh)
    params = init_params(config, jax.random.key(0))
    if weights is not None:
        save_weights(params, config, weights)
        (weights / "config.json").write_text(json.dumps(case.config()))
    state = programs.init_state(shard_params(params, abstract_params(config), mesh))

    ids, advantages = case.batch()
    cut = case.tokens // SAMPLES // PROMPT
    samples = [Sample(tokens[:cut], tokens[cut:]) for tokens in ids]
    size = {"tokens": case.tokens, "rows": rows, "microbatches": microbatch_bound(spec)}
    packed = pack(samples, **size)
    each = token_weights([len(s.output) for s in samples], "token", max_new_tokens=case.tokens)
    per_token = [packed.scatter(values) for values in (each, advantages.tolist())]
    tokens, (on_mesh, advantage) = shard_batch((packed.batch, per_token), mesh)
    return Prepared(config, programs, state, tokens, on_mesh, advantage, packed.microbatches)


def measure(case: Case, weights: Path | None = None) -> dict[str, Any]:
    """Seconds and numbers of `case.repeats` updates, after one that is not counted."""
    ready = prepare(case, weights)
    seconds: dict[str, list[float]] = {"old": [], "update": []}
    numbers: list[dict[str, float]] = []
    for _ in range(case.repeats + 1):
        began = time.perf_counter()
        old = jax.block_until_ready(ready.old_logprobs())
        seconds["old"].append(time.perf_counter() - began)
        began = time.perf_counter()
        total = ready.accumulate(old)
        metrics = total.metrics
        ready.state, update = ready.programs.apply(ready.state, total)
        del total
        norm = float(update.grad_norm)
        seconds["update"].append(time.perf_counter() - began)
        numbers.append({"loss": float(metrics.loss), "grad_norm": norm})
    return _report(case, ready.config, seconds, numbers)


def _report(
    case: Case, config: Any, seconds: dict[str, list[float]], numbers: list[dict[str, float]]
) -> dict[str, Any]:
    device = jax.devices()[0]
    flops, peak = useful_flops(config, case.lengths), peak_flops(device.device_kind)
    old_s, update_s = (statistics.median(times[1:]) for times in seconds.values())
    memory = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "device": device.device_kind,
        "jax": jax.__version__,
        "layers": case.layers,
        "tokens": case.tokens,
        "first_s": [round(times[0], 2) for times in seconds.values()],
        "old_s": old_s,
        "update_s": update_s,
        "useful_flops": flops,
        "mfu_update": None if peak is None else flops / (update_s * peak),
        "mfu_with_old": None if peak is None else flops / ((old_s + update_s) * peak),
        "peak_bytes": memory,
        "numbers": numbers,
    }


if __name__ == "__main__":
    print(json.dumps(measure(*side_arguments())))
