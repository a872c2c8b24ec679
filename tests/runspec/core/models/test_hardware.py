"""Devices by kind, how many there are, and names that JAX gives them."""

from __future__ import annotations

import pytest

from runspec.core.models.hardware import DEVICES, device_count, jax_device
from runspec.core.spec.schema import Hardware


@pytest.mark.parametrize(
    ("fields", "slices", "count"),
    [
        ({"topology": "4x4x4"}, 1, 64),
        ({"topology": "4x4"}, 2, 32),
        ({"topology": "2x2", "count": 5}, 1, 4),
        ({"count": 8}, 1, 8),
        ({}, 1, None),
        ({"topology": "4x"}, 1, None),
    ],
)
def test_devices_are_counted_over_topology_and_slices(
    fields: dict[str, object], slices: int, count: int | None
) -> None:
    hardware = Hardware.model_validate({"kind": "tpu-v5e", **fields})
    assert device_count(hardware, slices) == count


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("TPU v5 lite", "tpu-v5e"),
        ("TPU v5", "tpu-v5p"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("NVIDIA A100-SXM4-80GB", "a100-80g"),
        ("NVIDIA H100 80GB HBM3", "h100-80g"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA L40S", "l40s"),
    ],
)
def test_a_device_is_found_by_the_name_that_jax_gives_it(name: str, kind: str) -> None:
    assert jax_device(name) == DEVICES[kind]
