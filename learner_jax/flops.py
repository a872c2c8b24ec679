"""MFU: the share of useful FLOPs in what the devices could do in the time.

    MFU = useful / (seconds x devices x peak FLOP/s of one device)

with the useful FLOPs of `runspec.core.models.flops`. PaLM's MFU (arXiv 2204.02311, appendix B) is
the same but for counting the masked half of attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runspec.core.models.config import ModelConfig
from runspec.core.models.flops import useful_flops
from runspec.core.models.hardware import jax_device
from runspec.core.spec.schema import Lora


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device by the name that JAX gives it; None for one not listed."""
    device = jax_device(device_kind)
    return None if device is None else device.peak_flops


@dataclass(frozen=True)
class Meter:
    """What MFU has to know of a run."""

    config: ModelConfig
    lora: Lora | None
    devices: int
    peak: float | None
    """FLOP/s of one device; None where it is not known, as for CPUs."""

    def mfu(self, lengths: Sequence[int], seconds: float) -> float | None:
        """MFU of training samples of these lengths in that time; None without a peak."""
        if self.peak is None:
            return None
        return useful_flops(self.config, lengths, self.lora) / (seconds * self.devices * self.peak)
