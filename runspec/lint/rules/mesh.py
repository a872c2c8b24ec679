"""Rules on the learner's machines: topology, rows over the mesh, attention kernels, islands.

The learner does not shard a dimension that its mesh axes do not divide, so that every mesh computes
the same. These rules report where that costs time or memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod

from runspec.core.models.hardware import DEVICES, device_count
from runspec.core.spec.islands import members
from runspec.core.spec.schema import Hardware, RunSpec
from runspec.lint.registry import Context, Violation, divisors, rule

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


@rule("padded-microbatch", "mesh", "warning", runs="grpo")
def padded_microbatch(context: Context) -> Iterator[Violation]:
    """The sequences of an update must divide by data x fsdp x microbatch, to fill its microbatches.

        S = n x rows,  n whole           S = prompts_per_step / updates_per_step x group_size
        packing.rows = data x fsdp x (rows of a device)

    Where a packed row holds one sequence of full length, S of them need S rows, and the last
    microbatch is filled up with rows of padding, which cost as much as real ones. Shorter sequences
    share rows, so what a run wastes is at most this. Rows that hold several of full length are not
    looked at: how many come to share one no spec says. The loss does not change: padding has no
    weight in it.
    """
    spec = context.spec
    algorithm, packing, mesh = spec.grpo, spec.learner.packing, spec.learner.mesh
    groups = -(-algorithm.prompts_per_step // algorithm.updates_per_step)
    sequences, shards = groups * algorithm.group_size, mesh.data * mesh.fsdp
    longest = spec.data.max_prompt_tokens + max(pool.max_new_tokens for pool in spec.samplers)
    in_a_row = packing.tokens // longest
    if sequences < shards or packing.rows % shards:
        return  # `idle-shards` and `rows-divide` say so
    if in_a_row != 1 or sequences % packing.rows == 0:
        return
    padding = -sequences % packing.rows
    yield Violation(
        ("learner", "packing", "rows"),
        f"an update's {sequences} sequences are {padding} short of whole microbatches of "
        f"{packing.rows} rows: up to {padding / (sequences + padding):.0%} of its rows are padding",
        numbers={
            "sequences_per_update": sequences,
            "data": mesh.data,
            "fsdp": mesh.fsdp,
            "microbatch": packing.rows // shards,
        },
        suggestion=_rows_that_divide(sequences, shards, packing.rows),
    )


def _rows_that_divide(sequences: int, shards: int, limit: int) -> str:
    fitting = [n for n in divisors(sequences, limit) if n % shards == 0]
    return f"{fitting[-1]} rows divide evenly" if fitting else "change group_size or the mesh"


@rule("attention-kernel", "mesh")
def attention_kernel(context: Context) -> Iterator[Violation]:
    """A named attention kernel must run on the learner's hardware, with its types and its mesh.

        splash   TPUs, compute_dtype bfloat16 or float32
        cudnn    NVIDIA GPUs, compute_dtype bfloat16, whole rows (context: 1), head sizes that are
                 multiples of 8 up to 256
        xla      everywhere

    `auto` takes the platform's own where these hold, and xla else. The learner refuses a named
    kernel that cannot run when it starts, which is after the chips were rented.
    """
    learner = context.spec.learner
    name, kind = learner.attention, learner.hardware.kind
    if name in ("auto", "xla") or kind not in DEVICES:
        return
    platform = "CPUs" if kind == "cpu" else "TPUs" if kind.startswith("tpu-") else "GPUs"
    if platform != {"splash": "TPUs", "cudnn": "GPUs"}[name]:
        reason = f"does not run on {platform}"
    elif name == "splash":
        return
    elif learner.compute_dtype != "bfloat16":
        reason = f"computes in bfloat16, not in {learner.compute_dtype}"
    elif learner.mesh.context > 1:
        reason = f"needs whole rows, and context = {learner.mesh.context} cuts them"
    elif (config := context.config) and (config.head_dim % 8 or config.head_dim > 256):
        reason = f"takes head sizes of 8 n up to 256, not {config.head_dim}"
    else:
        return
    yield Violation(
        ("learner", "attention"),
        f"{name} {reason}",
        suggestion="auto",
    )


_ISLANDS = ("learner", "islands")


@rule("island-trunk", "algorithm")
def island_trunk(context: Context) -> Iterator[Violation]:
    """The first island must not name a machine: it has the learner's.

        learner.islands.members[0]: no hardware, mesh, hosts or rows

    The first island is the process `learner`, which has the run directory and publishes the
    versions. `learner.hardware`, `mesh`, `hosts` and `packing.rows` are its own; the other islands
    have the same where they do not name theirs.
    """
    for member in members(context.spec)[:1]:
        own = {
            "hardware": member.hardware,
            "mesh": member.mesh,
            "hosts": member.hosts,
            "rows": member.rows,
        }
        for key, value in own.items():
            if value is not None:
                there = "packing.rows" if key == "rows" else key
                yield Violation(
                    (*_ISLANDS, "members", member.name, key),
                    f"{member.name} is the first island, whose {key} is learner.{there}",
                    suggestion=f"set learner.{there}",
                )
