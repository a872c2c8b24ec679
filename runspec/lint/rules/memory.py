"""Rules on device memory, and on numbers that rounding would lose.

The figures are those of `runspec plan`, from `runspec.estimate`. Rules that need the model's shape
or a device's memory are silent if it is unknown; `unknown-model` and `unknown-hardware` report
that.
"""

from __future__ import annotations

from math import ceil, sqrt

from runspec.core.models import DEVICES, ModelConfig, device_count, device_of
from runspec.core.models.parameters import MAX_LOGITS, MEMORY_UTILIZATION, prefill_bytes
from runspec.core.models.parameters import logits_chunk as logits_positions
from runspec.core.schema.schema_fields import close_match
from runspec.estimate import learner_memory
from runspec.estimate.assumed import weight_move
from runspec.estimate.broadcast import version_size
from runspec.estimate.speed import sampler_memory
from runspec.lint import (
    Context,
    Found,
    Violation,
    all_hardware,
    model_rule,
    relation,
    rule,
)

STATE_SHARE = 0.9
"""Share of a device's memory that the train state may take."""
HALF_STEP = 2.0**-9
"""Half the distance of bfloat16 neighbours, relative to the larger: 8 significant bits."""
WIDEST = 16384
"""Hidden size taken for a model whose shape is not known: it has the smallest weights."""


_SMALLER_ROWS = "fewer packing.rows, shorter rows, more context, or remat: offload"
_RELIEF = {
    "remat": "remat: full",
    **dict.fromkeys(("activations", "temporaries", "logits"), _SMALLER_ROWS),
    "weights": "old_logprobs: sampler, kl: {coef: 0}, or more fsdp or tensor",
    "state": "more fsdp or tensor, optimizer: {offload: true}, or learner.lora",
}
"""What to change, by the part of a step that takes most."""


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g} GB"


@rule("memory", "warning")
def unknown_hardware(context: Context) -> Found:
    """Hardware must be of a kind whose figures are known, or bring its own.

    Memory, FLOP/s and bandwidth of a device come from the table of `runspec.core.models`,
    by `kind`. Of another kind nothing can be said to fit and no time can be told, unless the spec
    gives `memory`, and for times `peak_flops` and `memory_bandwidth`.
    """
    for where, hardware in all_hardware(context.spec):
        longer = [kind for kind in DEVICES if hardware.kind and kind.startswith(hardware.kind)]
        close = " or ".join(longer) or close_match(hardware.kind, DEVICES)
        yield from relation(
            hardware.kind in DEVICES or hardware.memory is not None,
            f"{where}.kind",
            f"{hardware.kind[:80]!r} is not known: what needs its memory is not checked",
            f"did you mean {close}?" if close else "give its memory, like 80GB",
        )


@model_rule("memory")
def train_state_fits(context: Context, config: ModelConfig) -> Found:
    """Weights and optimizer moments must leave a tenth of the device's memory.

        masters + moments <= 0.9 x memory
        masters = b P / n,  moments = 4 k P / n

    P trained parameters, b bytes of a master (4 in float32), n the devices that a parameter is cut
    over: fsdp x tensor for most. k is 2 for adamw, 1 for sgd and for the layers' matrices under
    muon, 0 on the device with `optimizer.offload`. Gradients, activations and the compiler's own
    buffers must fit beside them.
    """
    memory = device_of(context.spec.learner.hardware).memory
    if memory is None:
        return ()
    needs = learner_memory(context.spec, config)
    return relation(
        needs.state <= STATE_SHARE * memory,
        "learner.mesh",
        f"masters {_gb(needs.masters)} + moments {_gb(needs.moments)} = {_gb(needs.state)} a "
        f"device, over 90 % of {_gb(memory)}",
        "more fsdp or tensor, optimizer: {offload: true}, or learner.lora",
        {
            "masters": round(needs.masters),
            "moments": round(needs.moments),
            "memory": round(memory),
        },
    )


@model_rule("memory")
def step_fits(context: Context, config: ModelConfig) -> Found:
    """A whole training step must fit into the device's memory.

        masters + moments + gradients + published + reference
            + activations + logits + temporaries <= memory

    a device, at the worst moment of the backward pass. `published` is the version's bits, under
    which pi_old is recomputed; `reference` is version 0's, or the base under adapters. `runspec
    plan` shows the parts, and `runspec plan --aot` asks the compiler itself.
    """
    spec = context.spec
    memory = device_of(spec.learner.hardware).memory
    if memory is None:
        return
    needs = learner_memory(spec, config)
    if needs.state > STATE_SHARE * memory or needs.total <= memory:
        return  # `train-state-fits` says so, or all is well
    parts = {
        "state": round(needs.state),
        "gradients": round(needs.gradients),
        "weights": round(needs.published + needs.reference),
        "activations": round(needs.activations),
        "logits": round(needs.logits),
        "temporaries": round(needs.temporaries),
    }
    held = {name: size for name, size in parts.items() if size}
    largest = max(held, key=held.__getitem__)
    if largest == "activations" and spec.learner.remat not in ("full", "offload"):
        largest = "remat"
    yield Violation(
        ("learner",),
        f"a step needs {_gb(needs.total)} a device, which has {_gb(memory)}: "
        + ", ".join(f"{name} {_gb(size)}" for name, size in held.items()),
        numbers={**held, "memory": round(memory)},
        suggestion=_RELIEF.get(largest, _RELIEF["state"]),
    )


@model_rule("memory")
def logits_chunk(context: Context, config: ModelConfig) -> Found:
    """The logits that exist at a time must be a chunk, not those of every position.

        n x V <= 2^29,   n = min(logits_chunk, positions of a device)

    V the vocabulary. Logits are float32: 2^29 are 2 GiB, over all shards of the vocabulary, and the
    backward pass makes two more arrays of their size. Measured with V = 152k, 8192 positions: 13.7
    GB with all logits at once, 2.7 GB in chunks of 256. Null chooses 512 to 2048 positions, within
    this bound.
    """
    learner, vocabulary = context.spec.learner, config.vocab_size
    positions = logits_positions(learner, vocabulary)
    return relation(
        learner.logits_chunk is None or positions * vocabulary <= MAX_LOGITS,
        "learner.logits_chunk",
        f"{positions} positions x {vocabulary} tokens x 4 bytes = "
        f"{_gb(4 * positions * vocabulary)} of logits at a time",
        f"at most {MAX_LOGITS // vocabulary}, or null",
        {"positions": positions, "vocab_size": vocabulary, "limit": MAX_LOGITS},
    )


@rule("memory")
def bf16_master(context: Context) -> Found:
    """bfloat16 masters need a learning rate above their rounding floor.

        lr x |u| > 2^-9 |w|,   |u| about 1,   |w| about 1 / sqrt(D)

    bfloat16 has 8 significant bits, so the neighbours of w lie 2^-8 |w| to 2^-7 |w| away, and what
    moves it by less than half of that rounds back to w, every time: nothing adds up. u is AdamW's
    update before the learning rate, D the hidden size, and 1 / sqrt(D) the size of a weight that
    keeps activations at their scale. At D = 5120 the floor is 2.7e-5; 3e-7 moves only weights below
    1.5e-4. With sgd lr is as in `learning-rate`. Adapters start at zero and are not looked at.
    """
    spec, config = context.spec, context.config
    if spec.learner.master_dtype != "bfloat16" or spec.learner.lora is not None:
        return ()
    if config is None and spec.optimizer.kind == "sgd":
        return ()
    width = WIDEST if config is None else config.hidden_size
    floor = HALF_STEP / sqrt(width)
    move = spec.optimizer.lr if config is None else weight_move(spec, config)
    return relation(
        move > floor,
        "learner.master_dtype",
        f"bfloat16 rounds updates of {move:g} away: a weight of {1 / sqrt(width):.2g} moves only "
        f"by more than {floor:.2g}",
        "float32",
        {"move": move, "floor": floor, "hidden_size": width},
    )


@model_rule("memory")
def sampler_weights_fit(context: Context, config: ModelConfig) -> Found:
    """A replica's share of the weights must fit into its devices.

        weights / tensor + activations < 0.92 x memory

    0.92 is the share of memory that vLLM takes (`gpu_memory_utilization`, version 0.32);
    activations are the largest temporary arrays, of a prefill or of the logits. What is left is
    room for keys and values.
    """
    for pool in context.spec.samplers:
        needs = sampler_memory(pool, context.spec, config)
        if needs.room is None or needs.memory is None:
            continue
        yield from relation(
            needs.room > 0,
            f"samplers.{pool.name}.hardware",
            f"weights {_gb(needs.weights)} + activations {_gb(needs.activations)} on each of "
            f"{pool.parallel.tensor} devices, of which vLLM may use "
            f"{_gb(MEMORY_UTILIZATION * needs.memory)}",
            "more parallel.tensor, or hardware with more memory",
            {
                "weights": round(needs.weights),
                "activations": round(needs.activations),
                "memory": round(needs.memory),
            },
        )


@model_rule("memory")
def validator_weights_fit(context: Context, config: ModelConfig) -> Found:
    """A validator's share of a version must fit into its devices, with room to work.

        1.5 x version / devices <= memory

    Both prefill engines divide a version over all devices of a validator: JAX by parameters, torch
    by layers. The half beside it is for activations and logits. Silent where `verify.hardware` is
    null.
    """
    spec, hardware = context.spec, context.spec.verify.hardware
    memory = device_of(hardware).memory if hardware else None
    if hardware is None or memory is None or not spec.verify.validators:
        return ()
    version, devices = version_size(spec, config).whole, device_count(hardware) or 1
    needed = prefill_bytes(version, devices)
    return relation(
        needed <= memory,
        "verify.hardware",
        f"a version of {_gb(version)} over {devices} devices needs {_gb(needed)} on each, which "
        f"has {_gb(memory)}",
        f"count: {ceil(prefill_bytes(version, 1) / memory)}",
        {"version": version, "devices": devices, "memory": round(memory)},
    )


@model_rule("memory")
def kv_cache_fits(context: Context, config: ModelConfig) -> Found:
    """The keys and values of one sequence of full length must fit beside the weights.

        max_model_len x 2 L ceil(K / t) h b <= room

    L layers, K key/value heads of size h, b bytes of a number, t tensor-parallel ranks; `room` is
    what weights and activations leave (`explain sampler-weights-fit`). vLLM refuses to start
    otherwise. One sequence is the least; how many fit at a time is in `runspec plan`.
    """
    for pool in context.spec.samplers:
        needs, length = sampler_memory(pool, context.spec, config), pool.max_model_len
        if needs.room is None or needs.room <= 0:
            continue
        yield from relation(
            length * needs.kv_token <= needs.room,
            f"samplers.{pool.name}.max_model_len",
            f"keys and values of {length} tokens are {_gb(length * needs.kv_token)} a device, and "
            f"there is room for {_gb(needs.room)}",
            f"at most {int(needs.room // needs.kv_token)}, or more parallel.tensor",
            {
                "max_model_len": length,
                "kv_bytes_per_token": round(needs.kv_token),
                "room": round(needs.room),
            },
        )
