"""Packed attention and its gradients against the whole matrix in float32, then its speed.

Ways are those of `learner_jax.attention`: `xla`, and on NVIDIA GPUs `bucketed` and `packed` of
cuDNN. TFLOP/s count the causal pairs inside segments: 4 x heads x head size x pairs forward, 2.5
times as many backward. A way that was found wrong is not timed. The learner's own choice and the
other ways are parts of their own (`--variant chosen`, `others`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.accelerator.rows import Row, Settings, at_most, serve
from learner_jax.attention import cudnn, xla
from learner_jax.attention.xla import segment_starts, visible

OUTPUT_LIMIT, GRADIENT_LIMIT = 0.005, 0.01
"""Relative errors in bfloat16. XLA's way shows 0.002 and 0.003: the output's rounding alone. Flash
kernels also round probabilities, and sums over grouped heads."""
LAYOUTS = {
    "uneven, a hole, padding": [300, 1, 1, 212, -64, 129, 200],
    "length % 128 = 64": [448, 320, 256],
    "one-token segments": [1] * 1024,
    "one segment": [1024],
}
LENGTH = 1024
Way = Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]


def ways() -> dict[str, Way]:
    """(q, k, v, segment ids) -> output, by name; the learner's own choice comes last."""

    def whole_rows(attend: Callable[..., jax.Array]) -> Way:
        def way(q: jax.Array, k: jax.Array, v: jax.Array, ids: jax.Array) -> jax.Array:
            return attend(q, k, v, ids, jnp.arange(ids.shape[1], dtype=jnp.int32))

        return way

    found = {"xla": whole_rows(xla.attend)}
    device = jax.devices()[0]
    if device.platform == "gpu":
        for rows in dict.fromkeys((cudnn.bucketed, cudnn.rows_for(device))):
            found[rows.__name__] = whole_rows(partial(cudnn.attend, rows=rows))
    return found


def measure(settings: Settings) -> Iterator[Row]:
    settings.require(jax.devices()[0].platform)
    *others, chosen = ways().items()
    for name, way in others if settings.variant == "others" else [chosen]:
        right = True
        for row in numerics(name, way, settings.small):
            right &= row.verdict == "ok"
            yield row
        if right:
            yield from speed(name, way, settings)


def numerics(name: str, way: Way, small: bool) -> Iterator[Row]:
    """The worst relative errors over layouts of segments, head sizes and sizes of scores."""
    output = gradients = 0.0
    program = jax.jit(partial(outcome, way))
    for size in (8,) if small else (64, 128):
        q, k, v, d_out = random_arrays((2, LENGTH), 8, 2, size)
        for lengths in list(LAYOUTS.values())[:: 3 if small else 1]:
            ids = jnp.asarray(rows_of(lengths, (1, LENGTH)).repeat(2, axis=0))
            for scale in (1.0, 100.0):  # 100: strongly negative scores
                arguments = (q * scale, k, v, d_out, ids)
                out, dq, dk, dv = errors(program(*arguments), TRUTH(*arguments), d_out)
                # At 100 softmax is nearly 0 or 1: dq and dk are differences of rounded numbers.
                judged = [dv, *(each for each in (dq, dk) if scale == 1.0 or np.isinf(each))]
                output, gradients = max(out, output), max(*judged, gradients)
    shapes = "8 / 2 heads of 8" if small else "8 / 2 heads of 64 and 128"
    yield at_most(f"{name}, {shapes}: output", output, OUTPUT_LIMIT)
    yield at_most(f"{name}: dq, dk, dv", gradients, GRADIENT_LIMIT)


def errors(
    found: tuple[jax.Array, ...], expected: tuple[jax.Array, ...], d_out: jax.Array
) -> list[float]:
    """||a - b|| / max(||b||, ||d_out|| / 1000) of each; infinite where a number is not finite."""
    floor = np.linalg.norm(np.asarray(d_out, np.float64)) / 1e3
    result = []
    for one, other in zip(found, expected, strict=True):
        a, b = (np.asarray(x, np.float64) for x in (one, other))
        distance = np.linalg.norm(a - b) / max(np.linalg.norm(b), floor)
        result.append(float(distance) if np.isfinite(a).all() else np.inf)
    return result


def speed(name: str, way: Way, settings: Settings) -> Iterator[Row]:
    """Forward, and forward with backward, of one row of equal segments."""
    tokens, heads, kv_heads, size = (256, 4, 2, 8) if settings.small else (16384, 32, 8, 128)
    q, k, v, d_out = random_arrays((1, tokens), heads, kv_heads, size)
    ids = rows_of([tokens // 8] * 8, (1, tokens))
    passes: dict[str, tuple[Callable[..., Any], tuple[Any, ...], float]] = {
        "forward": (way, (q, k, v), 1.0),
        "forward and backward": (partial(backward, way), (q, k, v, d_out), 3.5),
    }
    if settings.small:
        del passes["forward"]
    for which, (function, arrays, factor) in passes.items():
        program = jax.jit(function)
        seconds = best_of(5, lambda: program(*arrays, ids))  # noqa: B023
        flops = factor * 4.0 * heads * size * causal_pairs(ids)
        text = f"{seconds * 1e3:.2f} ms, {flops / seconds / 1e12:.0f} TFLOP/s"
        what = f"{name}, {tokens} tokens in 8 segments, {heads} / {kv_heads} heads of {size}"
        yield Row(f"{what}: {which}", settings.speed(text))


def best_of(count: int, call: Callable[[], Any]) -> float:
    """Seconds of the best of some calls, after one that is not counted."""
    jax.block_until_ready(call())
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - begun)
    return min(times)


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


TRUTH = jax.jit(partial(outcome, whole_matrix))


def backward(
    attend: Way, q: jax.Array, k: jax.Array, v: jax.Array, d_out: jax.Array, ids: jax.Array
) -> tuple[jax.Array, ...]:
    _, pull = jax.vjp(lambda *x: attend(*x, ids), q, k, v)
    return pull(d_out)


if __name__ == "__main__":
    serve(measure)
