"""Time to the first step with an empty and with a filled cache of compiled programs; prints JSON.

    python -m benchmarks.compile_time

Two processes after each other share a folder. On this machine's CPU each makes one optimizer update
of the laptop profile from random weights; for a TPU each compiles a small model's gradient for
v5p:2x2x2, without a chip. Seconds of the whole process, its imports and start included, and the
compiler's own CPU and clock.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.runs import ROOT, SPEC

TARGETS = ("cpu", "tpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=TARGETS, help="one process of one kind")
    parser.add_argument("--cache", help="its folder")
    options = parser.parse_args()
    if options.target:
        print(json.dumps(first_step(options.target, options.cache)))
        return
    print(json.dumps({target: _cold_and_warm(target) for target in TARGETS}))


def _cold_and_warm(target: str) -> dict[str, Any]:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm"):
            command = ["-m", "benchmarks.compile_time", "--target", target, "--cache", cache]
            began = time.perf_counter()
            done = subprocess.run(
                [sys.executable, *command], env=environment, capture_output=True, check=True
            )
            process_s = round(time.perf_counter() - began, 2)
            found[state] = json.loads(done.stdout) | {"process_s": process_s}
    return found


def first_step(target: str, cache: str) -> dict[str, Any]:
    from learner_jax.topology import prepare_environment

    prepare_environment()
    from pathlib import Path

    from learner_jax.compile_cache import CompileCounter, keep_compiled

    keep_compiled(Path(cache))
    counter = CompileCounter()
    began, cpu = time.perf_counter(), time.process_time()
    (_update_here if target == "cpu" else _compile_for_tpu)()
    return {
        "first_step_s": round(time.perf_counter() - began, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
        "programs": counter.requests,
        "from_cache": counter.hits,
    }


def _update_here() -> None:
    import jax

    from learner_jax.model import abstract_params, init_params
    from learner_jax.sharding import make_mesh, shard_params
    from learner_jax.step import build_programs
    from learner_jax.training import compile_ahead
    from learner_jax.warm_start import model_config
    from runspec.spec.load import load_spec

    spec = load_spec(ROOT / SPEC, profile="laptop").require()
    config, mesh = model_config(spec), make_mesh(spec.learner.mesh)
    programs = build_programs(spec, config, mesh)
    params = shard_params(init_params(config, jax.random.key(0)), abstract_params(config), mesh)
    state = programs.init_state(params)
    compile_ahead(mesh, programs, state, programs.publish(state.params))


def _compile_for_tpu() -> None:
    from benchmarks.weak_scaling import slice_spec
    from bridge.config import parse_config
    from learner_jax.aot import analyse
    from learner_jax.topology import parse_topology, topology_devices
    from runspec.spec.named_models import named_model

    shape = named_model("Qwen/Qwen3-4B")
    assert shape is not None
    config = parse_config(shape, place="Qwen/Qwen3-4B")
    devices = topology_devices(parse_topology("v5p:2x2x2"))
    spec = slice_spec("2x2x2", fsdp=4, tensor=2, rows=4, tokens=4096)
    analyse(spec, config, devices, memory=None, names=["accumulate"])


if __name__ == "__main__":
    main()
