"""One H200: the learner's full update beside the same step in torch; prints JSON.

    python -m benchmarks.gpu_learner            # ten minutes at most
    python -m benchmarks.gpu_learner --tiny     # both sides on a CPU, small, from the same weights

No GPU has run it yet. Random weights in the shape of Llama-3.1-8B and Qwen2.5-7B, 16,384 and
32,768 tokens packed, bf16 products, float32 masters, moments and gradients. A step is pi_old, then
the gradient, its clip and AdamW; both times are shown. MFU counts the formula of
`learner_jax/flops.py` over the GPU's dense bf16 peak, of the update alone and with pi_old.

Where 8 billion parameters with Adam do not fit, the depth is what does: 22 bytes a parameter
(master 4, moments 8, gradients 8, published 2) and 12 GB of room for the rest; after a refusal a
tenth less. The torch side gets the same depth. Each measurement is a process of its own, in the
order of what is most needed; one that fails says so and takes no other with it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

from benchmarks.gpu.case import LAYERS, SHAPES, Case

TOTAL_S = 570.0
BYTES_A_PARAMETER, ROOM = 22, 12e9
FLAGS = (
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_enable_command_buffer=",
    "--xla_gpu_enable_dynamic_slice_fusion=true",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small, on a CPU")
    if parser.parse_args().tiny:
        print(json.dumps(tiny()))
        return
    memory = gpu_memory()
    if memory is None:
        print(json.dumps({"error": "no NVIDIA GPU here; --tiny runs on a CPU"}))
        return
    print(json.dumps(whole(memory)))


def tiny() -> dict[str, Any]:
    """Both sides from the same weights; their losses are equal."""
    case = Case("tiny", LAYERS["tiny"], tokens=256, dtype="float32", repeats=2)
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as weights:
        options = ["--weights", weights]
        return {
            side: run(side, case, 200.0, environment, options) for side in ("ours", "torch_side")
        }


def whole(memory: int) -> dict[str, Any]:
    """Everything that ten minutes hold."""
    deadline = time.monotonic() + TOTAL_S
    with tempfile.TemporaryDirectory() as cache:
        environment = {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.95",
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        }

        def left() -> float:
            return max(deadline - time.monotonic(), 1.0)

        found: dict[str, Any] = {"memory_bytes": memory}
        depths: dict[str, int] = {}
        for shape, tokens in (("llama-8b", 16384), ("llama-8b", 32768), ("qwen-7b", 16384)):
            case = Case(shape, depths.get(shape) or deepest(shape, memory), tokens)
            ours = run("ours", case, left(), environment)
            while "out of memory" in ours.get("error", "") and case.layers > 1:
                case = replace(case, layers=case.layers * 9 // 10)
                ours = run("ours", case, left(), environment)
            depths[shape] = case.layers
            theirs = run("torch_side", case, left(), environment)
            found[f"{shape} {tokens}"] = {"ours": ours, "torch": theirs}
        case = Case("llama-8b", depths["llama-8b"], 16384, repeats=3)
        for flag in FLAGS:
            found[flag] = run("ours", case, left(), environment | {"XLA_FLAGS": flag})
    return found


def deepest(shape: str, memory: int) -> int:
    """Layers whose training fits in the memory of one GPU, at most those of the model."""
    s = SHAPES[shape]
    d, heads = s["hidden_size"], s["num_attention_heads"] + s["num_key_value_heads"]
    layer = d * s["head_dim"] * 2 * heads + 3 * d * s["intermediate_size"]
    room = 0.95 * memory - ROOM - BYTES_A_PARAMETER * 2 * d * s["vocab_size"]
    return max(1, min(LAYERS[shape], int(room / (BYTES_A_PARAMETER * layer))))


def gpu_memory() -> int | None:
    """Bytes of the first GPU, None where there is none."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return int(done.stdout.split()[0]) * 2**20


def run(
    side: str,
    case: Case,
    limit: float,
    environment: dict[str, str],
    options: list[str] | None = None,
) -> dict[str, Any]:
    """What one side prints, or why it printed nothing."""
    command = [sys.executable, "-m", f"benchmarks.gpu.{side}", *case.arguments(), *(options or [])]
    try:
        done = subprocess.run(
            command,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            timeout=limit,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return {"layers": case.layers, "error": f"no result within {limit:.0f} s"}
    except subprocess.CalledProcessError as failed:
        full = "RESOURCE_EXHAUSTED" in failed.stderr or "out of memory" in failed.stderr.lower()
        reason = "out of memory" if full else failed.stderr[-2000:]
        return {"layers": case.layers, "error": reason}
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    main()
