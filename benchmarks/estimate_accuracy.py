"""The closed-form estimate of the learner's memory against the compiler, no chip needed.

python -m benchmarks.estimate_accuracy [--cases NAME ...]

Each case is the learner's step of `specs/target_long.yaml` with another model, slice, mesh, packing
or remat. Both sides say what the run needs of one device while `accumulate` (forward pass, loss,
backward pass) runs: `runspec.estimate.learner_memory(...).total`, and `needed_bytes` of
`python -m learner_jax aot`. `own` is that without what the learner holds all the time anyway. One
line of JSON a case, as it is done: the largest takes a minute on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from typing import Any

from benchmarks.runs import ROOT
from learner_jax.aot_command import parse_topology, prepare_environment, topology_devices
from runspec.core.models.family import model_config
from runspec.core.schema import RunSpec
from runspec.core.schema.load import SpecFiles
from runspec.estimate import learner_memory
from runspec.lint.check import check_spec

QWQ, LLAMA = "Qwen/QwQ-32B", "meta-llama/Llama-3.1-8B"
QWEN3, METAGENE = "Qwen/Qwen3-4B", "metagene-ai/METAGENE-1"


@dataclass(frozen=True)
class Case:
    """A shape, a mesh and a packing."""

    model: str
    topology: str
    mesh: dict[str, int]
    tokens: int
    rows: int
    learner: dict[str, Any] = field(default_factory=dict)
    """Further fields of `learner`."""


CASES = {
    "32b": Case(QWQ, "v5p:4x4x4", {"fsdp": 16, "tensor": 4}, 34816, 16),
    "8b-fsdp": Case(LLAMA, "v5p:2x2x4", {"fsdp": 16}, 8192, 16),
    "8b-tensor": Case(LLAMA, "v5p:2x2x4", {"fsdp": 4, "tensor": 4}, 8192, 4),
    "8b-none": Case(LLAMA, "v5p:2x2x4", {"fsdp": 4, "tensor": 4}, 8192, 4, {"remat": "none"}),
    "8b-dots": Case(LLAMA, "v5p:2x2x4", {"fsdp": 4, "tensor": 4}, 8192, 4, {"remat": "dots"}),
    "8b-offload": Case(LLAMA, "v5p:2x2x4", {"fsdp": 4, "tensor": 4}, 8192, 4, {"remat": "offload"}),
    "8b-context": Case(LLAMA, "v5p:2x2x4", {"fsdp": 4, "context": 4}, 32768, 4),
    "8b-attention": Case(
        LLAMA, "v5e:8x8", {"fsdp": 8, "tensor": 8}, 16384, 16, {"remat": "attention"}
    ),
    "8b-lora": Case(LLAMA, "v6e:4x4", {"fsdp": 16}, 8192, 16, {"lora.rank": 16}),
    "8b-bf16-masters": Case(
        LLAMA, "v5p:2x2x4", {"fsdp": 16}, 8192, 16, {"master_dtype": "bfloat16"}
    ),
    "8b-fp32": Case(LLAMA, "v5p:2x2x4", {"fsdp": 16}, 8192, 16, {"compute_dtype": "float32"}),
    "4b-short": Case(QWEN3, "v5e:4x4", {"fsdp": 16}, 4096, 16),
    "4b-long": Case(QWEN3, "v5e:4x4", {"fsdp": 16}, 24576, 16),
    "4b-data": Case(QWEN3, "v6e:2x4", {"data": 2, "fsdp": 4}, 8192, 16),
    "6b-dots": Case(METAGENE, "v5p:2x2x2", {"fsdp": 8}, 4096, 32, {"remat": "dots"}),
}


def case_spec(case: Case) -> RunSpec:
    """The spec of a case; what lint says of it is no matter here."""
    chip, shape = case.topology.split(":")
    values = {
        "model.hf": case.model,
        "model.max_context": case.tokens,
        "data.max_prompt_tokens": case.tokens // 4,
        "algorithm.prompts_per_step": 32,
        "algorithm.updates_per_step": 2,
        "samplers.volunteers.max_model_len": case.tokens,
        "samplers.volunteers.max_new_tokens": case.tokens // 2,
        "learner.hardware.kind": f"tpu-{chip}",
        "learner.hardware.topology": shape,
        "learner.packing.tokens": case.tokens,
        "learner.packing.rows": case.rows,
        "learner.mesh.fsdp": 1,
        "learner.mesh.tensor": 1,
        **{f"learner.mesh.{axis}": size for axis, size in case.mesh.items()},
        **{f"learner.{name}": value for name, value in case.learner.items()},
    }
    overrides = [f"{path}={value}" for path, value in values.items()]
    spec = check_spec(SpecFiles(ROOT / "specs" / "target_long.yaml", overrides=overrides)).spec
    assert spec is not None
    return spec


def compare(case: Case) -> dict[str, Any]:
    """Bytes on one device, of both sides, and their ratios."""
    from learner_jax.aot import analyse

    spec = case_spec(case)
    config = model_config(spec)
    assert config is not None
    began = time.perf_counter()
    devices = topology_devices(parse_topology(case.topology))
    report = analyse(spec, config, devices, memory=None, names=["accumulate"])
    needed, own = report["memory"]["needed_bytes"], report["programs"]["accumulate"]["own_bytes"]
    estimate = learner_memory(spec, config)
    held = estimate.state + estimate.published + estimate.reference
    return {
        "estimate": round(estimate.total),
        "compiler": needed["accumulate"],
        "ratio": round(estimate.total / needed["accumulate"], 3),
        "own": {
            "estimate": round(estimate.total - held),
            "compiler": own,
            "ratio": round((estimate.total - held) / own, 3),
        },
        "moment": estimate.moment,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    prepare_environment()
    for name in options.cases:
        print(json.dumps({"case": name, **compare(CASES[name])}), flush=True)


if __name__ == "__main__":
    main()
