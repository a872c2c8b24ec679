"""Rules on sharding: rows, positions, heads and widths over the mesh.

The learner does not shard a dimension that its mesh axes do not divide, so that every mesh computes
the same. These rules report where that costs time or memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from runspec.core.models.config import ModelConfig
from runspec.core.models.hardware import DEVICES
from runspec.core.spec.schema import RunSpec
from runspec.lint.registry import Context, Violation, divisors, model_rule, rule


def longest_sequence(spec: RunSpec) -> int:
    """Tokens of the longest prompt with the longest output."""
    return spec.data.max_prompt_tokens + max(pool.max_new_tokens for pool in spec.samplers)


def update_sequences(spec: RunSpec) -> int:
    """Sequences of an optimizer update; of the larger ones where they differ."""
    algorithm = spec.grpo
    groups = -(-algorithm.prompts_per_step // algorithm.updates_per_step)
    return groups * algorithm.group_size


@rule("rows-divide", "mesh")
def rows_divide(context: Context) -> Iterator[Violation]:
    """The rows of a microbatch must divide over data x fsdp.

        packing.rows = n x data x fsdp,  n whole: the rows of a device

    The learner packs sequences into rows of a fixed length, and `packing.rows` of them, over all
    devices, make a microbatch. Every device takes the same number; the program is refused else.
    """
    learner = context.spec.learner
    rows, shards = learner.packing.rows, learner.mesh.data * learner.mesh.fsdp
    if rows % shards:
        yield Violation(
            ("learner", "packing", "rows"),
            f"{rows} is not divisible by data x fsdp = {shards}",
            numbers={"rows": rows, "data": learner.mesh.data, "fsdp": learner.mesh.fsdp},
            suggestion=f"{-(-rows // shards) * shards}",
        )


@rule("context-divides", "mesh")
def context_divides(context: Context) -> Iterator[Violation]:
    """The positions of a row must divide over twice the context axis.

        packing.tokens = n x 2 x context,  n whole

    A causal row costs more at its end, so with c shards a row is cut into 2c chunks, and shard i
    takes chunks i and 2c - 1 - i (Llama 3, arXiv 2407.21783, 3.3.2). Where 2c does not divide the
    row every shard computes attention over the whole of it: right, at c times the work, a warning.
    Where not even c does the program is refused, an error.
    """
    learner = context.spec.learner
    tokens, cut = learner.packing.tokens, learner.mesh.context
    if cut == 1 or tokens % (2 * cut) == 0:
        return
    refused = tokens % cut != 0
    yield Violation(
        ("learner", "packing", "tokens"),
        f"{tokens} is not divisible by context = {cut}"
        if refused
        else f"{tokens} is not divisible by 2 x context = {2 * cut}: each of {cut} shards computes "
        "attention over whole rows",
        numbers={"tokens": tokens, "context": cut},
        suggestion=f"{-(-tokens // (2 * cut)) * 2 * cut}",
        severity="error" if refused else "warning",
    )


@rule("idle-shards", "mesh", "warning", runs="grpo")
def idle_shards(context: Context) -> Iterator[Violation]:
    """An optimizer update must have a sequence for every shard of the batch.

        prompts_per_step / updates_per_step x group_size >= data x fsdp

    A sequence lies in one row, a row on one shard. With fewer sequences than shards some compute
    padding alone, whatever their lengths are.
    """
    spec = context.spec
    mesh, sequences = spec.learner.mesh, update_sequences(spec)
    shards = mesh.data * mesh.fsdp
    if sequences < shards:
        yield Violation(
            ("learner", "mesh"),
            f"{sequences} sequences an update on data x fsdp = {shards} shards: "
            f"{shards - sequences} have none",
            numbers={"sequences_per_update": sequences, "data": mesh.data, "fsdp": mesh.fsdp},
            suggestion="fewer updates a step, or more context or tensor in the place of fsdp",
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
    packing, mesh, sequences = spec.learner.packing, spec.learner.mesh, update_sequences(spec)
    shards, in_a_row = mesh.data * mesh.fsdp, packing.tokens // longest_sequence(spec)
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


@model_rule("tensor-heads", "mesh")
def tensor_heads(context: Context, config: ModelConfig) -> Iterator[Violation]:
    """The tensor axis must divide the model's query heads.

        num_attention_heads = n x tensor,  n whole

    Heads are what the tensor axis cuts in attention. Heads that it does not divide stay whole: each
    of `tensor` devices holds all of q and o and computes all of attention.
    """
    heads, tensor = config.num_attention_heads, context.spec.learner.mesh.tensor
    if heads % tensor == 0:
        return
    yield Violation(
        ("learner", "mesh", "tensor"),
        f"{tensor} does not divide {heads} heads: attention would be computed {tensor} times over",
        numbers={"tensor": tensor, "num_attention_heads": heads},
        suggestion=f"one of {', '.join(map(str, divisors(heads, heads)))}",
    )


@model_rule("tensor-kv-heads", "mesh", "warning")
def tensor_kv_heads(context: Context, config: ModelConfig) -> Iterator[Violation]:
    """The tensor axis ought to divide the model's key/value heads.

        num_key_value_heads = n x tensor,  n whole

    Else k and v projections are whole on every device of the axis, with their moments, and keys and
    values are repeated to lcm(kv heads, tensor) heads before attention, which costs memory in each
    layer. The result is the same: a warning.
    """
    kv_heads, tensor = config.num_key_value_heads, context.spec.learner.mesh.tensor
    if config.num_attention_heads % tensor or kv_heads % tensor == 0:
        return  # `tensor-heads` says so, or all is well
    repeated = lcm(kv_heads, tensor)
    yield Violation(
        ("learner", "mesh", "tensor"),
        f"{tensor} does not divide {kv_heads} key/value heads: they are held whole on each device "
        f"and repeated to {repeated}",
        numbers={"tensor": tensor, "num_key_value_heads": kv_heads, "repeated": repeated},
        suggestion=f"at most {kv_heads}, the rest in fsdp or context",
    )


@model_rule("sharded-widths", "mesh", "warning")
def sharded_widths(context: Context, config: ModelConfig) -> Iterator[Violation]:
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
        if size % cut:
            yield Violation(
                ("learner", "mesh", axis),
                f"{cut} does not divide {name} = {size}: what has that dimension is whole on "
                f"each of {cut} devices",
                numbers={axis: cut, name: size},
                suggestion="a power of two divides most widths",
            )


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
