"""Time to the first step with an empty and with a filled cache of compiled programs; prints JSON.

    python -m benchmarks.compile_time

Two processes, one after the other, share a folder. Each builds the programs of the laptop profile
on two virtual devices and runs score and accumulate once, as the learner does at its start.
Seconds of the whole process with its imports, of the first step, and of CPU.

There is no such figure for TPUs: libtpu without a TPU writes cache entries that it cannot read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.runs import ROOT, SPEC


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cache", type=Path, help="one process with this folder")
    cache = parser.parse_args().cache
    print(json.dumps(cold_and_warm() if cache is None else first_step(cache)))


def cold_and_warm() -> dict[str, Any]:
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm"):
            command = [sys.executable, "-m", "benchmarks.compile_time", "--cache", cache]
            began = time.perf_counter()
            done = subprocess.run(command, env=environment, capture_output=True, check=True)
            process_s = round(time.perf_counter() - began, 2)
            found[state] = json.loads(done.stdout) | {"process_s": process_s}
    return found


def first_step(cache: Path) -> dict[str, Any]:
    import jax

    from learner_jax.compile_cache import CompileCounter, keep_compiled
    from learner_jax.model import abstract_params, init_params
    from learner_jax.sharding import make_mesh, shard_params
    from learner_jax.step import build_programs, compile_ahead
    from learner_jax.warm_start import model_config
    from runspec.core.schema.load import SpecFiles
    from runspec.lint.check import check_spec

    keep_compiled(cache)
    counter = CompileCounter()
    began, cpu = time.perf_counter(), time.process_time()
    spec = check_spec(SpecFiles(ROOT / SPEC, profile="laptop")).require()
    config, mesh = model_config(spec), make_mesh(spec.learner.mesh)
    programs = build_programs(spec, config, mesh)
    params = init_params(config, jax.random.key(0))
    state = programs.init_state(shard_params(params, abstract_params(config), mesh))
    compile_ahead(mesh, programs, state, programs.publish(state.params))
    return {
        "first_step_s": round(time.perf_counter() - began, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
        "programs": counter.requests,
        "from_cache": counter.hits,
    }


if __name__ == "__main__":
    main()
