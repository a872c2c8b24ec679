"""Rules on the learner's machines: topology, devices, rows and widths over the mesh, kernels.

The learner does not shard a dimension that its mesh axes do not divide, so that every mesh computes
the same. These rules report where that costs time or memory.
"""

from __future__ import annotations

import re
from math import lcm, prod

from runspec.core.models import DEVICES, ModelConfig, device_count
from runspec.core.models.parameters import SHARING_NEEDS, can_share_prompts, sharing
from runspec.core.schema import RunSpec
from runspec.lint import (
    Context,
    Found,
    Violation,
    all_hardware,
    divisors,
    model_rule,
    relation,
    rule,
)

_TOPOLOGY = re.compile(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3})*")
_SQUARES = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_SMALL_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4")
CUBE = 4
LARGEST = {"tpu-v4": 4096, "tpu-v5p": 6144}
"""Chips of the largest slice."""


@rule("mesh")
def topology_form(context: Context) -> Found:
    """A TPU topology must be written like 4x4x4.

    Sides of the slice in chips, joined by `x`; their product is the number of chips.
    """
    for where, hardware in all_hardware(context.spec):
        yield from relation(
            hardware.topology is None or _TOPOLOGY.fullmatch(hardware.topology) is not None,
            f"{where}.topology",
            f"{hardware.topology!r} is not of the form 4x4x4",
            "4x4x4",
        )


@rule("mesh")
def tpu_topology(context: Context) -> Found:
    """A TPU topology must be a slice that its chip comes in.

        v5e, v6e   AxB: 1x1, 2x2, 2x4, 4x4, 4x8, 8x8, 8x16, 16x16
        v4, v5p    AxBxC: 2x2x1, 2x2x2, 2x2x4, 2x4x4; from a cube of 64 chips on
                   A <= B <= C, each a multiple of 4, at most 4096 (v4) or 6144 (v5p) chips

    Source: cloud.google.com/tpu/docs/v5e, v6e, v4 and v5p, "Supported configurations". Other shapes
    cannot be rented, and the TPU compiler makes no devices for them.
    """
    for where, hardware in all_hardware(context.spec):
        shape, flat = hardware.topology, hardware.kind in ("tpu-v5e", "tpu-v6e")
        if shape is None or not _TOPOLOGY.fullmatch(shape):
            continue  # `topology-form` says so
        usual = _SQUARES if flat else (*_SMALL_CUBES, "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")
        # The smallest usual slice with at least as many chips, the largest where none has.
        large = (each for each in usual if prod(_sides(each)) >= prod(_sides(shape)))
        yield from relation(
            _exists(hardware.kind, shape),
            f"{where}.topology",
            f"{hardware.kind} has no slice {shape}",
            next(large, usual[-1]),
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


@rule("mesh")
def topology_count(context: Context) -> Found:
    """A count beside a topology must be its number of chips.

        count = slices x product of the topology's sides

    The learner's slices are `learner.mesh.slices`; a replica of a pool has one.
    """
    spec = context.spec
    for where, hardware in all_hardware(spec):
        slices = spec.learner.mesh.slices if where == "learner.hardware" else 1
        devices = device_count(hardware, slices)
        if hardware.topology is None or devices is None or hardware.count is None:
            continue
        of = f"{slices} slices of " if slices > 1 else ""
        yield from relation(
            hardware.count == devices,
            f"{where}.count",
            f"{hardware.count}, but {of}topology {hardware.topology} has {devices} devices",
            f"{devices}, or leave count out",
            {"count": hardware.count, "devices": devices},
        )


@rule("mesh")
def mesh_fits(context: Context) -> Found:
    """The product of the mesh axes must be the number of devices.

        data x fsdp x context x tensor = slices x chips of the topology,  or count

    With fewer devices the program does not start; more are paid for and idle.
    """
    learner, mesh = context.spec.learner, context.spec.learner.mesh
    devices, others = device_count(learner.hardware, mesh.slices), mesh.devices // mesh.fsdp
    if devices is None:
        return ()
    sizes = {axis: getattr(mesh, axis) for axis in ("data", "fsdp", "context", "tensor")}
    return relation(
        mesh.devices == devices,
        "learner.mesh",
        f"data x fsdp x context x tensor = {mesh.devices}, but there are {devices} devices",
        f"axes whose product is {devices}" if devices % others else f"fsdp: {devices // others}",
        {**sizes, "devices": devices},
    )


@rule("mesh")
def hosts_divide(context: Context) -> Found:
    """The learner's processes must hold equal shares of its devices.

        devices of the mesh = n x hosts,  n whole

    `jax.distributed` joins `hosts` processes into one program; the mesh is made of equal blocks.
    """
    devices, hosts = context.spec.learner.mesh.devices, context.spec.learner.hosts
    return relation(
        devices % hosts == 0,
        "learner.hosts",
        f"{hosts} does not divide the {devices} devices",
        f"{divisors(devices, hosts)[-1]}",
        {"hosts": hosts, "devices": devices},
    )


@rule("mesh")
def hosts_chips(context: Context) -> Found:
    """A TPU learner must have a process on every host of its slices.

        hosts >= chips / chips of a host

    A host of v4 and v5p has 4 chips; one of v5e and v6e has 8 in slices up to 2x4, else 4. A
    process drives the chips of its own host only (cloud.google.com/tpu/docs/v4, v5p, v5e, v6e).
    """
    learner, slices = context.spec.learner, context.spec.learner.mesh.slices
    kind, chips = learner.hardware.kind, device_count(learner.hardware, slices)
    if kind not in ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e") or chips is None:
        return ()
    most = 8 if kind in ("tpu-v5e", "tpu-v6e") and chips // slices <= 8 else 4
    return relation(
        learner.hosts * most >= chips,
        "learner.hosts",
        f"{chips} chips of {kind} are on hosts of {most}",
        f"hosts: {-(-chips // most)}",
        {"chips": chips, "chips_per_host": most, "hosts": learner.hosts},
    )


@rule("mesh")
def slices_divide(context: Context) -> Found:
    """The axis that crosses slices must be a multiple of their number.

        size of slice_axis = n x slices,  n whole

    Only that axis runs over the slow network between slices: its outer part from slice to slice,
    its inner part inside one.
    """
    mesh = context.spec.learner.mesh
    axis, slices = mesh.slice_axis, mesh.slices
    size = mesh.data if axis == "data" else mesh.fsdp
    return relation(
        size % slices == 0,
        "learner.mesh.slices",
        f"{slices} does not divide {axis} = {size}",
        f"{axis}: {lcm(size, slices)}, or another slice_axis",
        {"slices": slices, axis: size},
    )


@rule("mesh")
def rows_divide(context: Context) -> Found:
    """The rows of a microbatch must divide over data x fsdp.

        packing.rows = n x data x fsdp,  n whole: the rows of a device

    The learner packs sequences into rows of a fixed length, and `packing.rows` of them, over all
    devices, make a microbatch. Every device takes the same number; the program is refused else.
    """
    mesh, rows = context.spec.learner.mesh, context.spec.learner.packing.rows
    shards = mesh.data * mesh.fsdp
    return relation(
        rows % shards == 0,
        "learner.packing.rows",
        f"{rows} is not divisible by data x fsdp = {shards}",
        f"{-(-rows // shards) * shards}",
        {"rows": rows, "data": mesh.data, "fsdp": mesh.fsdp},
    )


@rule("mesh")
def context_divides(context: Context) -> Found:
    """The positions of a row must divide over twice the context axis.

        packing.tokens = n x 2 x context,  n whole

    A causal row costs more at its end, so with c shards a row is cut into 2c chunks, and shard i
    takes chunks i and 2c - 1 - i (Llama 3, arXiv 2407.21783, 3.3.2). Where 2c does not divide the
    row every shard computes attention over the whole of it: right, at c times the work, a warning.
    Where not even c does the program is refused, an error.
    """
    learner = context.spec.learner
    tokens, cut = learner.packing.tokens, learner.mesh.context
    refused = tokens % cut != 0
    return relation(
        cut == 1 or tokens % (2 * cut) == 0,
        "learner.packing.tokens",
        f"{tokens} is not divisible by context = {cut}"
        if refused
        else f"{tokens} is not divisible by 2 x context = {2 * cut}: each of {cut} shards computes "
        "attention over whole rows",
        f"{-(-tokens // (2 * cut)) * 2 * cut}",
        {"tokens": tokens, "context": cut},
        "error" if refused else "warning",
    )


def _update_sequences(spec: RunSpec) -> int:
    """Sequences of a step's largest update."""
    groups = -(-spec.grpo.prompts_per_step // spec.grpo.updates_per_step)
    return groups * spec.grpo.group_size


@rule("mesh", "warning", runs="grpo")
def idle_shards(context: Context) -> Found:
    """An optimizer update must have a sequence for every shard of the batch.

        prompts_per_step / updates_per_step x group_size >= data x fsdp

    A sequence lies in one row, a row on one shard. With fewer sequences than shards some compute
    padding alone, whatever their lengths are.
    """
    mesh, sequences = context.spec.learner.mesh, _update_sequences(context.spec)
    shards = mesh.data * mesh.fsdp
    return relation(
        sequences >= shards,
        "learner.mesh",
        f"{sequences} sequences an update on data x fsdp = {shards} shards: {shards - sequences} "
        "have none",
        "fewer updates a step, or more context or tensor in the place of fsdp",
        {"sequences_per_update": sequences, "data": mesh.data, "fsdp": mesh.fsdp},
    )


@rule("mesh", "warning", runs="grpo")
def padded_microbatch(context: Context) -> Found:
    """The sequences of an update must divide by data x fsdp x microbatch, to fill its microbatches.

        S = n x rows,  n whole           S = prompts_per_step / updates_per_step x group_size
        packing.rows = data x fsdp x (rows of a device)

    Where a packed row holds one sequence of full length, S of them need S rows, and the last
    microbatch is filled up with rows of padding, which cost as much as real ones. Shorter sequences
    share rows, so what a run wastes is at most this. Rows that hold several of full length are not
    looked at: how many come to share one no spec says; nor is a learner that shares prompts, whose
    samples have no rows. The loss does not change: padding has no weight in it.
    """
    spec = context.spec
    packing, mesh = spec.learner.packing, spec.learner.mesh
    sequences, shards = _update_sequences(spec), mesh.data * mesh.fsdp
    longest = spec.data.max_prompt_tokens + max(pool.max_new_tokens for pool in spec.samplers)
    in_a_row = packing.tokens // longest
    if sequences < shards or packing.rows % shards:
        return  # `idle-shards` and `rows-divide` say so
    shared = sharing(spec, cpu=spec.learner.hardware.kind == "cpu")
    if in_a_row != 1 or sequences % packing.rows == 0 or shared:
        return
    padding = -sequences % packing.rows
    fitting = [rows for rows in divisors(sequences, packing.rows) if rows % shards == 0]
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
        suggestion=f"{fitting[-1]} rows divide evenly"
        if fitting
        else "change group_size or the mesh",
    )


@model_rule("mesh")
def tensor_heads(context: Context, config: ModelConfig) -> Found:
    """The tensor axis must divide the model's query heads.

        num_attention_heads = n x tensor,  n whole

    Heads are what the tensor axis cuts in attention. Heads that it does not divide stay whole: each
    of `tensor` devices holds all of q and o and computes all of attention.
    """
    heads, tensor = config.num_attention_heads, context.spec.learner.mesh.tensor
    return relation(
        heads % tensor == 0,
        "learner.mesh.tensor",
        f"{tensor} does not divide {heads} heads: attention would be computed {tensor} times over",
        f"one of {', '.join(map(str, divisors(heads, heads)))}",
        {"tensor": tensor, "num_attention_heads": heads},
    )


@model_rule("mesh", "warning")
def tensor_kv_heads(context: Context, config: ModelConfig) -> Found:
    """The tensor axis ought to divide the model's key/value heads.

        num_key_value_heads = n x tensor,  n whole

    Else k and v projections are whole on every device of the axis, with their moments, and keys and
    values are repeated to lcm(kv heads, tensor) heads before attention, which costs memory in each
    layer. The result is the same: a warning.
    """
    heads, tensor = config.num_key_value_heads, context.spec.learner.mesh.tensor
    if config.num_attention_heads % tensor:
        return ()  # `tensor-heads` says so
    repeated = lcm(heads, tensor)
    return relation(
        heads % tensor == 0,
        "learner.mesh.tensor",
        f"{tensor} does not divide {heads} key/value heads: they are held whole on each device and "
        f"repeated to {repeated}",
        f"at most {heads}, the rest in fsdp or context",
        {"tensor": tensor, "num_key_value_heads": heads, "repeated": repeated},
    )


@model_rule("mesh", "warning")
def sharded_widths(context: Context, config: ModelConfig) -> Found:
    """fsdp ought to divide the hidden size, and tensor the MLP's width and the vocabulary.

        hidden_size mod fsdp = 0,   intermediate_size mod tensor = 0,   vocab_size mod tensor = 0

    A dimension that its axis does not divide is whole on every device: with fsdp every parameter
    and both of its moments, so that more devices save no memory at all.
    """
    mesh = context.spec.learner.mesh
    for axis, cut, name, size in (
        ("fsdp", mesh.fsdp, "hidden_size", config.hidden_size),
        ("tensor", mesh.tensor, "intermediate_size", config.intermediate_size),
        ("tensor", mesh.tensor, "vocab_size", config.vocab_size),
    ):
        yield from relation(
            size % cut == 0,
            f"learner.mesh.{axis}",
            f"{cut} does not divide {name} = {size}: what has that dimension is whole on each of "
            f"{cut} devices",
            "a power of two divides most widths",
            {axis: cut, name: size},
        )


@rule("mesh")
def attention_kernel(context: Context) -> Found:
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


@rule("mesh")
def shared_prompts(context: Context) -> Found:
    """Samples share the positions of their prompt only where the kernel takes such a mask.

        xla      yes, and it is the kernel of CPUs; on CPUs it is the default, unless prompts are
                 short beside outputs
        splash   its public kernels give no gradient under such a mask
        cudnn    takes none

    Documents have no prompts in common, and under `context` > 1 a row is cut over devices. By
    default the learner then computes the prompt of every sample; asked to share, it refuses.
    """
    spec = context.spec
    cpu = spec.learner.hardware.kind == "cpu"
    if spec.learner.packing.shared_prompts and not can_share_prompts(spec, cpu=cpu):
        place = ("learner", "packing", "shared_prompts")
        yield Violation(place, SHARING_NEEDS, suggestion="null")
