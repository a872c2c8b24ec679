"""Three learner updates equal torch's: loss, gradient norm, clip and AdamW."""

from __future__ import annotations

from itertools import starmap


def run() -> dict[str, object]:
    """The largest relative differences, in float32 on a CPU.

    Raises:
        AssertionError: one is above 1e-5.
    """
    from benchmarks.gpu_learner import tiny

    found = tiny()
    updates = list(zip(*(found[side]["numbers"] for side in ("ours", "torch_side")), strict=True))

    def differences(name: str) -> list[float]:
        return list(starmap(lambda a, b: abs(a[name] / b[name] - 1), updates))

    largest = {name: max(differences(name)) for name in ("loss", "grad_norm")}
    assert all(value < 1e-5 for value in largest.values()), largest
    return {"updates": len(updates), **{name: f"{value:.1e}" for name, value in largest.items()}}
