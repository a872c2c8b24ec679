"""Times the TOPLOC codec on one core; prints JSON, milliseconds a 32-token chunk.

    taskset -c 0 python -m benchmarks.toploc_codec [--backend numpy] [--backend jax]

`single` is one chunk a call, `batch` many chunks a call; the best of the repeats, so that other
work on the machine counts little. Each backend is measured in a process of its own, JAX on its
default device, which the rows name; `device` times are of activations and proofs that lie there
and results that stay there, all others begin with numpy arrays and end with bytes. Published
package, same kind of machine: build 0.44-0.71 ms at hidden 1024 and 0.60 ms at 5120, verify 0.12
and 0.27 ms.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when numpy is first imported

import numpy as np

from verify.toploc import build_proofs_batch, verify_proofs_batch

_CHUNKS = {64: 192, 1024: 32, 5120: 16}
"""Chunks a batch by hidden size; 192 of 64 is a step of the quickstart."""


def best_ms(action: Callable[[], object], repeats: int) -> float:
    action()
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        action()
        times.append(time.perf_counter() - begun)
    return min(times) * 1e3


def activations(hidden: int, chunks: int) -> list[np.ndarray]:
    """A chunk a rollout: u16 [32, hidden] each."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(chunks, 32, hidden)).astype(np.float32)
    return list((values.view(np.uint32) >> 16).astype(np.uint16))


def measure(codec: Any, hidden: int, chunks: int, repeats: int) -> dict[str, Any]:
    rollouts = activations(hidden, chunks)
    proofs = build_proofs_batch(rollouts)
    assert codec.build_proofs_batch(rollouts) == proofs
    assert codec.verify_proofs_batch(rollouts, proofs) == verify_proofs_batch(rollouts, proofs)
    one, its = rollouts[:1], proofs[:1]
    cases = {
        "build_single_ms": (lambda: codec.build_proofs_batch(one), 1),
        "build_batch_ms": (lambda: codec.build_proofs_batch(rollouts), chunks),
        "verify_single_ms": (lambda: codec.verify_proofs_batch(one, its), 1),
        "verify_batch_ms": (lambda: codec.verify_proofs_batch(rollouts, proofs), chunks),
    }
    times = {name: best_ms(action, repeats) / count for name, (action, count) in cases.items()}
    return {"hidden": hidden, "chunks": chunks, **times}


def measure_numpy(repeats: int) -> list[dict[str, Any]]:
    import verify.toploc as codec

    return [{"backend": "numpy", **measure(codec, *case, repeats)} for case in _CHUNKS.items()]


def measure_jax(repeats: int) -> list[dict[str, Any]]:
    import jax

    from verify.toploc import jax_codec

    rows = []
    for hidden, chunks in _CHUNKS.items():
        flat = [chunk.reshape(-1) for chunk in activations(hidden, chunks)]
        bits, sizes = jax.device_put(jax_codec.padded(flat))
        words, _ = jax_codec.encode(bits, sizes)
        encode = partial(_finished, jax_codec.encode, bits, sizes)
        evaluate = partial(_finished, jax_codec.evaluate_at, bits, sizes, words)
        rows.append(
            {
                "backend": "jax",
                "device": jax.devices()[0].device_kind,
                **measure(jax_codec, hidden, chunks, repeats),
                "build_device_ms": best_ms(encode, repeats) / chunks,
                "evaluate_device_ms": best_ms(evaluate, repeats) / chunks,
            }
        )
    return rows


def _finished(function: Callable[..., Any], *arguments: Any) -> Any:
    """Its result, once the device has it."""
    import jax

    return jax.block_until_ready(function(*arguments))


BACKENDS = {"numpy": measure_numpy, "jax": measure_jax}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--backend", action="append", choices=BACKENDS)
    options = parser.parse_args()
    chosen = options.backend or list(BACKENDS)
    if len(chosen) == 1:
        rows = BACKENDS[chosen[0]](options.repeats)
    else:
        command = [sys.executable, "-m", "benchmarks.toploc_codec", "--repeats"]
        command += [str(options.repeats), "--backend"]
        printed = [subprocess.check_output([*command, name], text=True) for name in chosen]
        rows = [row for text in printed for row in json.loads(text)["rows"]]
    print(json.dumps({"benchmark": "toploc_codec", "rows": rows}))


if __name__ == "__main__":
    main()
