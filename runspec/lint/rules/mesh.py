"""How the learner divides its devices."""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from runspec.lint.registry import Context, Violation, rule
from runspec.spec.schema import Hardware

_TOPOLOGY = re.compile(r"[0-9]{1,5}(x[0-9]{1,5})*")


@rule("shape-heads", "mesh")
def shape_heads(context: Context) -> Iterator[Violation]:
    """The heads of a shape must divide its width and one another."""
    spec = context.spec
    shape = spec.model.shape
    if shape is None:
        return
    heads, kv_heads = shape.num_attention_heads, shape.num_key_value_heads
    if shape.head_dim is not None and shape.head_dim % 2:
        yield Violation(
            ("model", "shape", "head_dim"), f"{shape.head_dim} is odd, RoPE turns pairs"
        )
    if shape.head_dim is None and shape.hidden_size % (2 * heads):
        yield Violation(
            ("model", "shape", "hidden_size"),
            f"{shape.hidden_size} does not give {heads} heads of an even size",
        )
    if heads % kv_heads:
        yield Violation(
            ("model", "shape", "num_key_value_heads"), f"{kv_heads} does not divide {heads} heads"
        )


@rule("topology-form", "mesh")
def topology_form(context: Context) -> Iterator[Violation]:
    """A TPU topology is written like 4x4x4."""
    spec = context.spec
    asked: list[tuple[tuple[str, ...], Hardware]] = [(("learner",), spec.learner.hardware)]
    asked += [(("samplers", pool.name), pool.hardware) for pool in spec.samplers]
    for where, hardware in asked:
        if hardware.topology is not None and not _TOPOLOGY.fullmatch(hardware.topology):
            yield Violation(
                (*where, "hardware", "topology"), f"{hardware.topology!r} is not of the form 4x4x4"
            )


@rule("mesh-fits", "mesh")
def mesh_fits(context: Context) -> Iterator[Violation]:
    """The product of the mesh axes is the number of devices."""
    spec = context.spec
    mesh, hardware = spec.learner.mesh, spec.learner.hardware
    product = mesh.data * mesh.fsdp * mesh.context * mesh.tensor
    devices = hardware.count
    if hardware.topology is not None:
        if not _TOPOLOGY.fullmatch(hardware.topology):
            return  # `topology_form` says so
        devices = mesh.slices * prod(int(side) for side in hardware.topology.split("x"))
        if hardware.count not in (None, devices):
            of = f"{mesh.slices} slices of " if mesh.slices > 1 else ""
            yield Violation(
                ("learner", "hardware", "count"),
                f"{hardware.count}, but {of}topology {hardware.topology} has {devices} devices",
            )
    if devices is not None and product != devices:
        yield Violation(
            ("learner", "mesh"),
            f"data x fsdp x context x tensor = {product}, but there are {devices} devices",
        )
    if product % spec.learner.hosts:
        yield Violation(
            ("learner", "hosts"), f"{spec.learner.hosts} does not divide the {product} devices"
        )
    if getattr(mesh, mesh.slice_axis) % mesh.slices:
        yield Violation(
            ("learner", "mesh", "slices"),
            f"{mesh.slices} does not divide {mesh.slice_axis} = {getattr(mesh, mesh.slice_axis)}",
        )


@rule("lora-targets", "mesh")
def lora_targets(context: Context) -> Iterator[Violation]:
    """Each matrix is named once."""
    spec = context.spec
    targets = spec.learner.lora.targets if spec.learner.lora else []
    for target in sorted({target for target in targets if targets.count(target) > 1}):
        yield Violation(("learner", "lora", "targets"), f"names {target} more than once")


@rule("rows-divide", "mesh")
def rows_divide(context: Context) -> Iterator[Violation]:
    """Rows divide over data x fsdp, positions over context."""
    spec = context.spec
    mesh, rows = spec.learner.mesh, spec.learner.packing.rows
    shards = mesh.data * mesh.fsdp
    if rows % shards:
        yield Violation(
            ("learner", "packing", "rows"), f"{rows} is not divisible by data x fsdp = {shards}"
        )
    if spec.learner.packing.tokens % mesh.context:
        yield Violation(
            ("learner", "packing", "tokens"),
            f"{spec.learner.packing.tokens} is not divisible by context = {mesh.context}",
        )
