"""Rules on sharding: rows, positions, heads and widths over the mesh.

The learner does not shard a dimension that its mesh axes do not divide, so that every mesh computes
the same. These rules report where that costs time or memory.
"""

from __future__ import annotations

from collections.abc import Iterator

from runspec.core.models.hardware import DEVICES
from runspec.lint.registry import Context, Violation, divisors, rule


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
