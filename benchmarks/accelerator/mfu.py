"""MFU of the learner's update at the layer shapes of a 7-8B model, as deep as the device holds.

22 bytes a parameter (master 4, moments 8, gradients 8, published 2) and `ROOM` for the rest; after
a refusal a quarter less. MFU counts the FLOPs of `runspec.core.models.parameters` over the device's
dense bfloat16 peak.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from benchmarks.accelerator.case import LAYERS, SHAPES, Case
from benchmarks.accelerator.rows import Row, Settings, serve
from benchmarks.accelerator.update import measure as measure_update

BYTES_A_PARAMETER, ROOM = 22, 12e9
TOKENS = 16384


def measure(settings: Settings) -> Iterator[Row]:
    device = jax.devices()[0]
    settings.require(device.platform)
    shape = settings.variant or ""
    if settings.small:
        case = Case("tiny", LAYERS["tiny"], tokens=256, repeats=1)
    else:
        memory = device.memory_stats()["bytes_limit"]
        case = Case(shape, deepest(shape, memory), TOKENS, repeats=4)
        text = f"{case.layers} of {LAYERS[shape]} layers in {memory / 1e9:.1f} GB"
        yield Row(f"{shape}: depth, by 22 bytes a parameter", text)
    found = fitting(case)
    numbers = [value for each in found["numbers"] for value in each.values()]
    finite = bool(np.isfinite(numbers).all())
    what = f"{shape}, {found['layers']} layers, {found['tokens']} tokens"
    verdict = "ok" if finite else "WRONG"
    yield Row(f"{what}: loss and norm finite", str(finite).lower(), "true", verdict)
    peak = f", {found['peak_bytes'] / 1e9:.1f} GB at most" if found["peak_bytes"] else ""
    for name, seconds, share in (
        ("update", found["update_s"], found["mfu_update"]),
        ("update and pi_old", found["old_s"] + found["update_s"], found["mfu_with_old"]),
    ):
        mfu = "MFU of an unlisted device" if share is None else f"MFU {share:.1%}"
        text = f"{mfu}, {seconds:.3f} s, {found['tokens'] / seconds:.0f} tokens/s{peak}"
        yield Row(f"{what}: {name}", settings.speed(text))


def deepest(shape: str, memory: int) -> int:
    """Layers whose training fits in so many bytes, at most those of the model."""
    s = SHAPES[shape]
    d, heads = s["hidden_size"], s["num_attention_heads"] + s["num_key_value_heads"]
    layer = d * s["head_dim"] * 2 * heads + 3 * d * s["intermediate_size"]
    room = memory - ROOM - BYTES_A_PARAMETER * 2 * d * s["vocab_size"]
    return max(1, min(LAYERS[shape], int(room / (BYTES_A_PARAMETER * layer))))


def fitting(case: Case) -> dict[str, Any]:
    """The report of the deepest case that the device does not refuse."""
    while True:
        try:
            return measure_update(case)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or case.layers == 1:
                raise
        jax.clear_caches()  # the refused arrays went with the exception
        case = replace(case, layers=case.layers * 3 // 4)


if __name__ == "__main__":
    serve(measure)
