"""Loss, log-probs and gradient of the learner in bfloat16 with the platform's attention kernel,
against the same in float32 with plain attention, on the same device and weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np

from benchmarks.accelerator.case import LAYERS, Case
from benchmarks.accelerator.rows import Row, Settings, at_most, serve
from benchmarks.accelerator.update import prepare
from learner_jax.step import Accumulated
from verify.thresholds import LOGPROB_ALARM

LOGPROB_LIMIT = LOGPROB_ALARM["bfloat16"]
LOSS_LIMIT, GRADIENT_LIMIT = 0.002, 0.06
"""On a CPU the shape `small` shows 0.0001 and 0.026."""


def measure(settings: Settings) -> Iterator[Row]:
    settings.require(jax.devices()[0].platform)
    shape, tokens = ("tiny", 256) if settings.small else ("small", 4096)
    plain = Case(shape, LAYERS[shape], tokens, dtype="float32", attention="xla")
    with jax.default_matmul_precision("highest"):
        ready = prepare(plain)
        old = ready.old_logprobs()
        expected = ready.accumulate(old)
        jax.block_until_ready(expected)
    found = prepare(replace(plain, dtype="bfloat16", attention="auto")).accumulate(old)
    yield from compared(found, expected, f"{shape}, {plain.layers} layers, {tokens} tokens")


def compared(found: Accumulated, expected: Accumulated, what: str) -> Iterator[Row]:
    """The rows of two accumulations."""
    logprobs = [np.asarray(each.logprobs, np.float64) for each in (found, expected)]
    targets = logprobs[1] != 0.0
    distance = np.abs(logprobs[0] - logprobs[1])[targets].mean()
    yield at_most(f"{what}: mean log-prob difference, nats", distance, LOGPROB_LIMIT)
    losses = [float(each.metrics.loss) for each in (found, expected)]
    yield at_most(f"{what}: loss difference", abs(losses[0] - losses[1]), LOSS_LIMIT)
    ours, theirs = (
        [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(each.grads)]
        for each in (found, expected)
    )
    errors = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(ours, theirs, strict=True)]
    yield at_most(f"{what}: gradient, worst of {len(errors)} tensors", max(errors), GRADIENT_LIMIT)


if __name__ == "__main__":
    serve(measure)
