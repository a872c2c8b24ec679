"""The GPU benchmark's small form: both of its sides make the same updates."""

from __future__ import annotations

import pytest

from benchmarks.gpu_learner import deepest, tiny


@pytest.mark.slow
def test_both_sides_make_the_same_updates() -> None:
    # When both sides make three updates from the same weights, in float32 on a CPU
    found = tiny()
    # Then losses and gradient norms agree at each: forward, backward, clip and AdamW
    ours, theirs = (found[side]["numbers"] for side in ("ours", "torch_side"))
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5)


def test_depth_is_what_fits_and_at_most_the_models() -> None:
    assert deepest("llama-8b", 10**12) == 32
    assert 15 <= deepest("llama-8b", 141 * 10**9) < 32
    assert deepest("llama-8b", 10**9) == 1
