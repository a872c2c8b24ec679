"""Rules on the learner's mesh: topology, devices, hosts, slices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from runspec.core.models.hardware import device_count
from runspec.core.spec.schema import Hardware, RunSpec
from runspec.lint.registry import Context, Violation, rule

_TOPOLOGY = re.compile(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3})*")
_SQUARES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
CUBE = 4
LARGEST = {"tpu-v4": 4096, "tpu-v5p": 6144}
"""Chips of the largest slice."""


def _all_hardware(spec: RunSpec) -> Iterator[tuple[tuple[str, ...], Hardware]]:
    yield ("learner", "hardware"), spec.learner.hardware
    for pool in spec.samplers:
        yield ("samplers", pool.name, "hardware"), pool.hardware
    if spec.verify.hardware is not None:
        yield ("verify", "hardware"), spec.verify.hardware


@rule("topology-form", "mesh")
def topology_form(context: Context) -> Iterator[Violation]:
    """A TPU topology must be written like 4x4x4.

    Sides of the slice in chips, joined by `x`; their product is the number of chips.
    """
    for where, hardware in _all_hardware(context.spec):
        if hardware.topology is not None and not _TOPOLOGY.fullmatch(hardware.topology):
            yield Violation(
                (*where, "topology"),
                f"{hardware.topology!r} is not of the form 4x4x4",
                suggestion="4x4x4",
            )


@rule("tpu-topology", "mesh")
def tpu_topology(context: Context) -> Iterator[Violation]:
    """A TPU topology must be a slice that its chip comes in.

        v5e, v6e   AxB: 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16
        v4, v5p    AxBxC: 2x2x1, 2x2x2, 2x2x4, 2x4x4; from a cube of 64 chips on
                   A <= B <= C, each a multiple of 4, at most 4096 (v4) or 6144 (v5p) chips

    Source: cloud.google.com/tpu/docs/v5e, v6e, v4 and v5p, "Supported configurations". Other shapes
    cannot be rented, and the TPU compiler makes no devices for them.
    """
    for where, hardware in _all_hardware(context.spec):
        shape = hardware.topology
        if shape is None or not _TOPOLOGY.fullmatch(shape) or _exists(hardware.kind, shape):
            continue
        flat = hardware.kind in ("tpu-v5e", "tpu-v6e")
        yield Violation(
            (*where, "topology"),
            f"{hardware.kind} has no slice {shape}",
            suggestion=_nearest(shape, flat=flat),
        )


def _exists(kind: str, shape: str) -> bool:
    if kind in ("tpu-v5e", "tpu-v6e"):
        return shape in _SQUARES
    if kind not in LARGEST:
        return True  # not a TPU, or one whose slices are not known here
    sides = _sides(shape)
    cubes = len(sides) == 3 and sides == sorted(sides) and not any(n % CUBE for n in sides)
    return shape in _SMALL_CUBES or (cubes and 0 < prod(sides) <= LARGEST[kind])


def _sides(shape: str) -> list[int]:
    return [int(side) for side in shape.split("x")]


def _nearest(shape: str, *, flat: bool) -> str:
    """The smallest usual slice with at least as many chips, the largest where none has."""
    usual = _SQUARES if flat else (*_SMALL_CUBES, "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
    wanted = prod(_sides(shape))
    return next((each for each in usual if prod(_sides(each)) >= wanted), usual[-1])


@rule("topology-count", "mesh")
def topology_count(context: Context) -> Iterator[Violation]:
    """A count beside a topology must be its number of chips.

        count = slices x product of the topology's sides

    The learner's slices are `learner.mesh.slices`; a replica of a pool has one.
    """
    spec = context.spec
    for where, hardware in _all_hardware(spec):
        slices = spec.learner.mesh.slices if where[0] == "learner" else 1
        devices = device_count(hardware, slices)
        if hardware.topology is None or devices is None or hardware.count in (None, devices):
            continue
        of = f"{slices} slices of " if slices > 1 else ""
        yield Violation(
            (*where, "count"),
            f"{hardware.count}, but {of}topology {hardware.topology} has {devices} devices",
            numbers={"count": hardware.count or 0, "devices": devices},
            suggestion=f"{devices}, or leave count out",
        )
