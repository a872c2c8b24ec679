"""Table of accelerators by their names in specs: memory, peak FLOP/s, memory bandwidth."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import prod

from runspec.core.schema import Hardware

_TOPOLOGY = re.compile(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3})*")


@dataclass(frozen=True)
class Device:
    """One device: a TPU chip, a GPU, or a virtual device of a CPU. None: unknown."""

    kind: str
    """Name, as in `hardware.kind`."""
    memory: float | None = None
    """Bytes."""
    peak_flops: float | None = None
    """Dense bfloat16 FLOP/s with sums in float32."""
    memory_bandwidth: float | None = None
    """Bytes/s."""
    jax_kinds: tuple[str, ...] = ()
    """JAX's `device_kind`: of a TPU exactly, of a GPU its beginning."""


# Decimal gigabytes, as vendors state them. TPUs: cloud.google.com/tpu/docs/{v4,v5e,v5p,v6e}. GPUs:
# NVIDIA's data sheets of the product named; where a sheet gives FLOP/s for matrices with structured
# zeros, half of it. Consumer GPUs: the architecture's white paper, sums in float32.
_KNOWN = (
    Device("cpu"),
    Device("tpu-v4", 32e9, 275e12, 1228e9, ("TPU v4",)),
    Device("tpu-v5e", 16e9, 197e12, 819e9, ("TPU v5 lite", "TPU v5e")),
    Device("tpu-v5p", 95e9, 459e12, 2765e9, ("TPU v5", "TPU v5p")),
    Device("tpu-v6e", 32e9, 918e12, 1640e9, ("TPU v6 lite", "TPU v6e")),
    # SXM; PCIe is the same
    Device("a100-40g", 40e9, 312e12, 1555e9, ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB")),
    Device("a100-80g", 80e9, 312e12, 2039e9, ("NVIDIA A100",)),  # SXM
    Device("h100-80g", 80e9, 989e12, 3350e9, ("NVIDIA H100",)),  # SXM
    Device("h100-pcie", 80e9, 756e12, 2000e9, ("NVIDIA H100 PCIe",)),
    Device("h100-nvl", 94e9, 835e12, 3900e9, ("NVIDIA H100 NVL",)),
    Device("h200-141g", 141e9, 989e12, 4800e9, ("NVIDIA H200",)),  # SXM
    Device("h200-nvl", 141e9, 835e12, 4800e9, ("NVIDIA H200 NVL",)),
    # of DGX B200: 1440 GB, 72 PFLOP/s fp8, 64 TB/s
    Device("b200-180g", 180e9, 2250e12, 8000e9, ("NVIDIA B200",)),
    Device("l4", 24e9, 121e12, 300e9, ("NVIDIA L4",)),
    Device("l40s", 48e9, 362e12, 864e9, ("NVIDIA L40S",)),
    # "NVIDIA Ampere GA102 GPU Architecture"
    Device("rtx-3090", 24e9, 71e12, 936e9, ("NVIDIA GeForce RTX 3090",)),
    # "NVIDIA Ada GPU Architecture"
    Device("rtx-4090", 24e9, 165e12, 1008e9, ("NVIDIA GeForce RTX 4090",)),
)
DEVICES: dict[str, Device] = {device.kind: device for device in _KNOWN}
"""Devices by `hardware.kind`; specs need no figures for them."""

_FIGURES = ("memory", "peak_flops", "memory_bandwidth")
"""Figures that a spec may set, under the same names."""


def device_of(hardware: Hardware) -> Device:
    """Return the device that a spec names; figures of the spec replace those of the table."""
    known = DEVICES.get(hardware.kind, Device(hardware.kind))
    figures = {name: getattr(hardware, name) for name in _FIGURES}
    return replace(known, **{name: value for name, value in figures.items() if value is not None})


def device_count(hardware: Hardware, slices: int = 1) -> int | None:
    """Return the number of devices of a learner (all `slices` of the topology) or of one replica.

    Args:
        hardware: hardware of the learner or of a pool.
        slices: `learner.mesh.slices`.

    Returns:
        The number from topology, else from count; None without both, or if the topology has
        another form than 4x4x4.
    """
    if hardware.topology is None:
        return hardware.count
    if not _TOPOLOGY.fullmatch(hardware.topology):
        return None
    return slices * prod(int(side) for side in hardware.topology.split("x"))


def jax_device(device_kind: str) -> Device | None:
    """Return the device of a JAX `device_kind`; None if it is not in the table."""
    named = {
        name: device
        for device in _KNOWN
        for name in device.jax_kinds
        if device_kind == name or (not name.startswith("TPU") and device_kind.startswith(name))
    }
    return named[max(named, key=len)] if named else None


def xla_threads(devices: int) -> dict[str, str]:
    """Environment by which virtual CPU devices have threads enough for their collectives.

    XLA's threads are as many as cores or devices, and one that waits in a collective does nothing
    else. A device with two collectives at once can hold them all; then the others never join, and
    XLA aborts the process after 40 s.
    """
    return {"NPROC": str(4 * devices)} if devices > 1 else {}
