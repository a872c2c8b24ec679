"""What the hardware of a run costs an hour."""

from __future__ import annotations

from runspec.estimate.hardware import device_count
from runspec.spec.schema import Hardware, RunSpec


def hourly_price(spec: RunSpec) -> float | None:
    """Devices times their `price_per_hour`: the learner, pools x replicas, and validators.

    Hardware that names no price costs nothing here, and counts as one device where the spec does
    not say how many it has. None where nothing has a price.
    """
    prices = [_price(spec.learner.hardware, 1, spec.learner.mesh.slices)]
    prices += [_price(pool.hardware, pool.replicas) for pool in spec.samplers]
    if spec.verify.hardware is not None:
        prices.append(_price(spec.verify.hardware, spec.verify.validators))
    known = [price for price in prices if price is not None]
    return sum(known) if known else None


def _price(hardware: Hardware, processes: int, slices: int = 1) -> float | None:
    if hardware.price_per_hour is None:
        return None
    return hardware.price_per_hour * (device_count(hardware, slices) or 1) * processes
