"""Measures packed attention and the vocabulary head on one GPU; prints JSON.

    python -m benchmarks.gpu_attention            # one H200, ten minutes at most
    python -m benchmarks.gpu_attention --tiny     # the same on a CPU, small, XLA's way alone

Each section is a process of its own, so that one that fails, or runs out of its time, takes no
other with it: its entry is then {"error": ...}. The order is that of what is most needed.

versions   JAX, cuDNN, device
numerics   each way's output and gradients against the whole matrix in float32
speed      each way at 32,768 tokens a call: milliseconds, useful TFLOP/s, bytes of temporaries
layers     four scanned layers, forward and backward, under each XLA flag that may matter
head       log-probs at 16,384 tokens by length of chunk, forward and backward

Useful FLOPs are those of the causal pairs inside segments: 4 x heads x head size x pairs forward,
2.5 times as many backward. Ways are `packed` and `bucketed` (learner_jax/attention/cudnn.py),
`xla`, and `tokamax` where it can be imported.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo as private

from learner_jax.attention import cudnn, xla
from learner_jax.attention.spans import segment_starts, visible
from learner_jax.logprobs import token_logprobs

TOTAL_S = 600.0
SECTIONS = {"versions": 30.0, "numerics": 120.0, "speed": 240.0, "layers": 130.0, "head": 70.0}
"""Seconds that each may take, start and compilation included."""
FLAGS = (
    "",
    "--xla_gpu_enable_triton_gemm=false",
    "--xla_gpu_enable_command_buffer=",
    "--xla_gpu_enable_dynamic_slice_fusion=true",
)
Way = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def ways(tiny: bool) -> dict[str, Way]:
    """(q, k, v, segment ids) -> output, by name."""

    def whole_rows(attend: Callable[..., jax.Array]) -> Way:
        def way(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
            return attend(q, k, v, ids, jnp.arange(ids.shape[1], dtype=jnp.int32))

        return way

    found = {"xla": whole_rows(xla.attend)}
    if not tiny:
        found["packed"] = whole_rows(partial(cudnn.attend, rows=cudnn.packed))
        found["bucketed"] = whole_rows(partial(cudnn.attend, rows=cudnn.bucketed))
    if importlib.util.find_spec("tokamax") is not None:
        found["tokamax"] = tokamax_way()
    return found


def tokamax_way() -> Way:
    """Its kernel takes the first key of each query; padding is a segment like any other."""
    from tokamax._src.ops.attention import api, base

    kernel = api.IMPLEMENTATIONS["mosaic_gpu"]

    def way(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
        mask = base.Mask(k_start=segment_starts(ids + 1)[:, None, :], is_causal=True)
        out = kernel(q, k, v, mask=mask, logits_scale=q.shape[-1] ** -0.5)
        return jnp.where((ids != 0)[:, :, None, None], out, 0)

    return way


def whole_matrix(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
    """In float32, T x T scores and all."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
    columns = jnp.arange(ids.shape[1])
    mask = visible(segment_starts(ids), columns, columns)[:, None]
    product = partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)
    scores = product("bqnh,btnh->bnqt", q, k) * q.shape[-1] ** -0.5
    weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
    out = product("bnqt,btnh->bqnh", weights, v)
    return jnp.where((ids != 0)[:, :, None, None], out, 0)


def random_arrays(shape: tuple[int, int], heads: int, kv_heads: int, size: int) -> list[jax.Array]:
    """Queries, keys, values and the gradient of the output, bfloat16."""
    keys = jax.random.split(jax.random.key(0), 4)
    counts = (heads, kv_heads, kv_heads, heads)
    return [
        jax.random.normal(key, (*shape, n, size), jnp.bfloat16)
        for key, n in zip(keys, counts, strict=True)
    ]


def rows_of(lengths: list[int], shape: tuple[int, int]) -> np.ndarray:
    """Segment ids: the lengths laid into rows one after another, cut at the end of a row.

    A negative length is padding between segments.
    """
    rows, length = shape
    ids = [number if n > 0 else 0 for number, n in enumerate(lengths, start=1)]
    stream = np.repeat(np.array(ids, np.int32), np.abs(lengths).astype(int))[: rows * length]
    stream = np.pad(stream, (0, rows * length - stream.size))
    return stream.reshape(shape).astype(np.int32)


def causal_pairs(ids: np.ndarray) -> int:
    """Query-key pairs that count."""
    starts = np.asarray(segment_starts(jnp.asarray(ids)))
    return int(np.maximum(np.arange(ids.shape[1]) - starts + 1, 0).sum())


def numerics(tiny: bool) -> Iterator[dict[str, Any]]:
    length = 1024
    layouts = {
        "uneven, a hole, padding": [300, 1, 1, 212, -64, 129, 200],
        "length % 128 = 64": [448, 320, 256],
        "one-token segments": [1] * length,
        "one segment": [length],
    }
    for size in (8,) if tiny else (64, 128):
        q, k, v, d_out = random_arrays((2, length), 8, 2, size)
        programs = {name: jax.jit(partial(outcome, way)) for name, way in ways(tiny).items()}
        truth = jax.jit(partial(outcome, whole_matrix))
        for name, lengths in layouts.items():
            ids = jnp.asarray(rows_of(lengths, (1, length)).repeat(2, axis=0))
            for scale in (1.0, 100.0):  # 100: strongly negative scores
                arguments = (q * scale, k, v, d_out, ids)
                expected = truth(*arguments)
                for way, program in programs.items():
                    yield {
                        "way": way,
                        "head_size": size,
                        "segments": name,
                        "scale": scale,
                        **attempt(partial(errors, program, arguments, expected)),
                    }


def outcome(
    attend: Way, q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, ids: jax.Array
) -> tuple[jax.Array, ...]:
    """Output and gradients, inside a remat and a scan of one layer, as the learner runs it."""

    def layer(_: None, x: tuple[jax.Array, ...]) -> tuple[None, jax.Array]:
        return None, attend(*x, ids)

    def stack(*x: jax.Array) -> jax.Array:
        return jax.lax.scan(jax.checkpoint(layer), None, jax.tree.map(lambda y: y[None], x))[1][0]

    out, pull = jax.vjp(stack, q, k, v)
    return out, *pull(d_out.astype(out.dtype))


def errors(
    program: Callable[..., tuple[jax.Array, ...]],
    arguments: tuple[jax.Array, ...],
    expected: tuple[jax.Array, ...],
) -> dict[str, Any]:
    """||a - b|| / max(||b||, ||d_out|| / 1000) of each; NaN where any number is."""
    floor = np.linalg.norm(np.asarray(arguments[3], np.float64)) / 1e3
    found = {}
    for name, a, b in zip(("out", "dq", "dk", "dv"), program(*arguments), expected, strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        found[name] = float(np.linalg.norm(a - b) / max(np.linalg.norm(b), floor))
    return {"errors": found}


def speed(tiny: bool) -> Iterator[dict[str, Any]]:
    tokens, heads, kv_heads, size = (1024, 4, 2, 16) if tiny else (32768, 32, 8, 128)
    mean = tokens // 16
    rng = np.random.default_rng(0)
    ragged = rng.lognormal(np.log(mean) - 0.32, 0.8, 64).clip(1, 4 * mean).astype(int).tolist()
    for rows in (1,) if tiny else (1, 2, 4):
        shape = (rows, tokens // rows)
        layouts = {"uniform": [mean] * 16, "log-normal": ragged, "one a row": [shape[1]] * rows}
        q, k, v, d_out = random_arrays(shape, heads, kv_heads, size)
        for way, attend in ways(tiny).items():
            passes = {
                "forward": (attend, (q, k, v), 1.0),
                "forward_backward": (partial(backward, attend), (q, k, v, d_out), 3.5),
            }
            for name, (function, arrays, factor) in passes.items():
                entry = {"way": way, "rows": rows, "pass": name}
                compiled = attempt(partial(compile_once, function, (*arrays, rows_of([], shape))))
                if "error" in compiled:
                    yield entry | compiled
                    continue
                for layout, lengths in layouts.items():
                    ids = rows_of(lengths, shape)
                    flops = factor * 4.0 * heads * size * causal_pairs(ids)
                    call = partial(timed, compiled["program"], (*arrays, jnp.asarray(ids)), flops)
                    yield entry | {"segments": layout} | attempt(call)


def backward(
    attend: Way, q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, ids: jax.Array
) -> tuple[jax.Array, ...]:
    _, pull = jax.vjp(lambda *x: attend(*x, ids), q, k, v)
    return pull(d_out)


def compile_once(function: Callable[..., Any], arguments: tuple[Any, ...]) -> dict[str, Any]:
    return {"program": jax.jit(function).lower(*arguments).compile()}


def timed(program: jax.stages.Compiled, arguments: tuple[Any, ...], flops: float) -> dict[str, Any]:
    """The best of five calls, after one that is not counted."""
    jax.block_until_ready(program(*arguments))
    best = np.inf
    for _ in range(5):
        begun = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        best = min(best, time.perf_counter() - begun)
    return {
        "ms": best * 1e3,
        "tflops": flops / best / 1e12,
        "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
    }


def compiled_and_timed(
    function: Callable[..., Any], arguments: tuple[Any, ...], flops: float
) -> dict[str, Any]:
    return timed(compile_once(function, arguments)["program"], arguments, flops)


def layers(tiny: bool) -> Iterator[dict[str, Any]]:
    """One entry for the flags of this process; `main` starts one a flag."""
    tokens, width, heads, kv_heads, size, hidden = (
        (256, 32, 4, 2, 8, 64) if tiny else (16384, 4096, 32, 8, 128, 14336)
    )
    shapes = {
        "q": (width, heads * size),
        "kv": (width, 2 * kv_heads * size),
        "o": (heads * size, width),
        "up": (width, 2 * hidden),
        "down": (hidden, width),
    }
    key = jax.random.key(0)
    weights = {
        name: jax.random.normal(key, (4, *shape), jnp.bfloat16) * shape[0] ** -0.5
        for name, shape in shapes.items()
    }
    x = jax.random.normal(key, (1, tokens, width), jnp.bfloat16)
    ids = jnp.asarray(rows_of([tokens // 8] * 8, (1, tokens)))
    attend = ways(tiny)["xla" if tiny else "packed"]

    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        q = (x @ w["q"]).reshape(1, tokens, heads, size)
        k, v = jnp.split((x @ w["kv"]).reshape(1, tokens, 2 * kv_heads, size), 2, axis=2)
        x = x + attend(q, k, v, ids).reshape(1, tokens, -1) @ w["o"]
        gate, up = jnp.split(x @ w["up"], 2, axis=-1)
        return x + (jax.nn.silu(gate) * up) @ w["down"], None

    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        out = jax.lax.scan(jax.checkpoint(layer, prevent_cse=False), x, weights)[0]
        return jnp.mean(jnp.square(out.astype(jnp.float32)))

    matrices = sum(leaf.size for leaf in weights.values())
    pairs = causal_pairs(np.asarray(ids))
    flops = 6.0 * matrices * tokens + 4 * 3 * 4.0 * heads * size * pairs
    yield attempt(partial(compiled_and_timed, jax.grad(loss), (weights, x), flops))


def head(tiny: bool) -> Iterator[dict[str, Any]]:
    tokens, width, vocabulary = (256, 32, 512) if tiny else (16384, 2560, 151936)
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (1, tokens, width), jnp.bfloat16)
    weight = jax.random.normal(keys[1], (width, vocabulary), jnp.float32) * width**-0.5
    targets = jax.random.randint(keys[2], (1, tokens), 1, vocabulary)

    def loss(chunk: int, hidden: jax.Array, weight: jax.Array) -> jax.Array:
        logprobs, entropy = token_logprobs(hidden, weight, targets, temperature=1.0, chunk=chunk)
        return jnp.mean(logprobs) + 0.1 * jnp.mean(entropy)

    flops = 6.0 * tokens * width * vocabulary
    for chunk in (64, 128) if tiny else (1024, 2048, 4096):
        gradient = jax.grad(partial(loss, chunk), (0, 1))
        measure = partial(compiled_and_timed, gradient, (hidden, weight), flops)
        yield {"chunk": chunk, **attempt(measure)}


def versions(tiny: bool) -> Iterator[dict[str, Any]]:
    device = jax.devices()[0]
    found = {"jax": jax.__version__, "device": device.device_kind, "platform": device.platform}
    if device.platform == "gpu":
        found["cudnn"] = str(private.check_cudnn_version())
    yield found


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A way that this machine cannot run is a result too."""
    try:
        return measure()
    except (NotImplementedError, RuntimeError, ValueError, TypeError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def run_section(name: str, tiny: bool, flags: str, deadline_s: float) -> list[Any]:
    """The entries that a process of its own printed, whether or not it came to its end."""
    command = [sys.executable, "-m", "benchmarks.gpu_attention", "--section", name]
    environment = os.environ | {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()}
    with subprocess.Popen(
        command + ["--tiny"] * tiny, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        try:
            output, _ = process.communicate(timeout=deadline_s)
            failure = f"exit status {process.returncode}" if process.returncode else None
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            failure = f"not done after {deadline_s:.0f} s"
    entries = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return [*entries, {"error": failure}] if failure else entries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--section", choices=SECTIONS)
    options = parser.parse_args()
    if options.section:
        for entry in globals()[options.section](options.tiny):
            print(json.dumps(entry), flush=True)
        return
    begun = time.monotonic()
    report: dict[str, Any] = {"benchmark": "gpu_attention"}
    for name, allowed in SECTIONS.items():
        flags = FLAGS[: 1 if options.tiny else None] if name == "layers" else ("",)
        report[name] = []
        for each in flags:
            left = TOTAL_S - (time.monotonic() - begun)
            entries = run_section(
                name, options.tiny, each, max(1.0, min(left, allowed / len(flags)))
            )
            report[name] += [{"flags": each, **entry} if each else entry for entry in entries]
        if name == "versions" and not options.tiny and entries[0].get("platform") != "gpu":
            print(json.dumps(report | {"skipped": "no GPU; on a CPU there is --tiny"}))
            return
    report["seconds"] = time.monotonic() - begun
    print(json.dumps(report))


if __name__ == "__main__":
    main()
