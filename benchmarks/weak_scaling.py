"""Weak scaling from 4 to 256 v5p chips, by analysis of the compiled step; prints JSON.

    python -m benchmarks.weak_scaling --chips 4 64 256

No chip runs: libtpu compiles the learner's programs for each slice, a row of `--tokens` tokens a
chip, parameters cut over all of them (fsdp), above 64 over 64 and copied (data). Counted in the
compiled programs, per chip and step (log-probs of pi_old, gradient of one microbatch, update):
FLOPs of matrix products, bytes to and from HBM, bytes sent between chips. Then

    compute = FLOPs / 459e12    HBM = bytes / 2765e9    ICI = bytes sent / 200e9    (seconds)

v5p as Google Cloud states it: 459 TFLOP/s in bf16, 2,765 GB/s, and 4,800 Gbit/s between chips over
six links, of which a ring along one axis of the torus uses two. Attention's kernel is not in the
count; added by formula, causal, a row one sample, a product 2 T^2 / 2 H h FLOPs a layer: two in
each forward pass, two more where remat repeats it, five in the backward pass. If everything
overlaps a step takes the largest term, if nothing does their sum. Efficiency is the time on the
fewest chips over the time on these. What it does not know: latency, stragglers, padding.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from benchmarks._hlo import Cost, program_cost
from benchmarks.runs import ROOT
from learner_jax.aot_command import (
    parse_topology,
    prepare_environment,
    topology_devices,
)
from runspec.core.models import DEVICES, ModelConfig
from runspec.core.models.family import model_names, named_model, parse_config
from runspec.core.models.parameters import device_positions, logits_chunk
from runspec.core.schema import RunSpec
from runspec.core.schema.load import SpecFiles
from runspec.lint.check import check_spec

SLICES = {4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4", 128: "4x4x8", 256: "4x8x8"}
MAX_FSDP = 64
V5P = DEVICES["tpu-v5p"]
FLOPS, HBM, ICI = 459e12, 2765e9, 200e9
PROGRAMS = ("score", "accumulate", "apply")
ATTENTION_PRODUCTS = {"score": 2, "accumulate": 2 + 2 + 5, "apply": 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chips", type=int, nargs="+", choices=SLICES, default=list(SLICES))
    parser.add_argument("--model", choices=model_names(), default="meta-llama/Llama-3.1-8B")
    parser.add_argument("--tokens", type=int, default=8192, help="of a chip, one row")
    options = parser.parse_args()
    prepare_environment()
    shape = named_model(options.model)
    assert shape is not None
    config = parse_config(shape, place=options.model)
    slices = [analyse_slice(config, chips, options.tokens) for chips in sorted(options.chips)]
    first = slices[0]["step"]
    for found in slices:
        for bound in ("overlapped_s", "serial_s"):
            found["efficiency_" + bound[:-2]] = round(first[bound] / found["step"][bound], 4)
    print(json.dumps({"model": options.model, "tokens_per_chip": options.tokens, "slices": slices}))


def slice_spec(chips: int, tokens: int) -> RunSpec:
    """The shipped long target on a slice, with a row of these tokens a chip."""
    fsdp = min(chips, MAX_FSDP)
    overrides = {
        "learner.hardware.topology": SLICES[chips],
        "learner.mesh.data": chips // fsdp,
        "learner.mesh.fsdp": fsdp,
        "learner.mesh.tensor": 1,
        "learner.packing.rows": chips,
        "learner.packing.tokens": tokens,
        "samplers.volunteers.max_model_len": tokens,
        "samplers.volunteers.max_new_tokens": tokens // 2,
        "data.max_prompt_tokens": tokens // 4,
        "reward.length.targets": [tokens // 4],
    }
    changes = [f"{path}={value}" for path, value in overrides.items()]
    # Not `require`: on few chips the step does not fit, which lint says and the report shows.
    spec = check_spec(SpecFiles(ROOT / "specs" / "target_long.yaml", overrides=changes)).spec
    assert spec is not None
    return spec


def analyse_slice(config: ModelConfig, chips: int, tokens: int) -> dict[str, Any]:
    from learner_jax.aot import analyse, compile_programs, learner_mesh
    from learner_jax.step import build_programs

    spec = slice_spec(chips, tokens)
    devices = topology_devices(parse_topology(f"v5p:{SLICES[chips]}"))
    memory = int(V5P.memory or 0)
    report = analyse(spec, config, devices, memory=memory, names=["accumulate"])
    programs = build_programs(spec, config, learner_mesh(spec, devices))
    # Of the head's loop, whose length is data's: every position has a target.
    chunks = -(-device_positions(spec.learner) // logits_chunk(spec.learner, config.vocab_size))
    costs = {
        each.name: program_cost(each.executable.as_text() or "", {"vocabulary_head": chunks})
        for each in compile_programs(programs, PROGRAMS)
        if each.executable is not None
    }
    terms = {name: _terms(config, name, cost, tokens) for name, cost in costs.items()}
    total = {term: sum(of[term] for of in terms.values()) for term in ("compute", "hbm", "ici")}
    return {
        "chips": chips,
        "needed_gigabytes": round(max(report["memory"]["needed_bytes"].values()) / 1e9, 1),
        "mesh": report["mesh"],
        "collectives": dict(costs["accumulate"].collectives),
        "seconds": {name: {k: round(v, 4) for k, v in of.items()} for name, of in terms.items()},
        "step": {
            "compute_s": total["compute"],
            "hbm_s": total["hbm"],
            "ici_s": total["ici"],
            "overlapped_s": sum(max(of.values()) for of in terms.values()),
            "serial_s": sum(total.values()),
        },
    }


def _terms(config: ModelConfig, name: str, cost: Cost, tokens: int) -> dict[str, float]:
    width = config.num_attention_heads * config.head_dim
    product = tokens * tokens * width * config.num_hidden_layers
    return {
        "compute": (cost.flops + ATTENTION_PRODUCTS[name] * product) / FLOPS,
        "hbm": cost.hbm_bytes / HBM,
        "ici": cost.wire_bytes.total() / ICI,
    }


if __name__ == "__main__":
    main()
