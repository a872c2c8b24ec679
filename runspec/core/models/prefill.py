"""What a validator's prefill takes of its devices."""

from __future__ import annotations

ROOM = 1.5
"""Memory that a version takes while it is run, of its size."""


def prefill_bytes(version: float, devices: int) -> float:
    """Memory that each of a validator's devices needs, in bytes.

        1.5 x version / devices

    Both engines divide a version evenly, JAX by parameters and torch by layers. The half beside it
    is for activations, logits and what the division leaves uneven.

    Args:
        version: bytes of its weights.
        devices: of one validator.
    """
    return ROOM * version / devices
