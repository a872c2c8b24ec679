"""Rules on device memory, and on numbers that rounding would lose.

The figures are those of `runspec plan`, from `runspec.estimate`. Rules that need the model's shape
or a device's memory are silent if it is unknown; `unknown-model` and `unknown-hardware` report
that.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import sqrt

from runspec.core.models.config import ModelConfig
from runspec.core.models.hardware import DEVICES, device_of
from runspec.core.spec.schema import Hardware, RunSpec
from runspec.core.spec.schema_fields import close_match
from runspec.estimate.assumed import weight_move
from runspec.estimate.learner import learner_memory
from runspec.lint.registry import STATE_SHARE, Context, Violation, gb, model_rule, rule

HALF_STEP = 2.0**-9
"""Half the distance of bfloat16 neighbours, relative to the larger: 8 significant bits."""
WIDEST = 16384
"""Hidden size taken for a model whose shape is not known: it has the smallest weights."""


@rule("unknown-hardware", "memory", "warning")
def unknown_hardware(context: Context) -> Iterator[Violation]:
    """Hardware must be of a kind whose figures are known, or bring its own.

    Memory, FLOP/s and bandwidth of a device come from the table of `runspec.core.models.hardware`,
    by `kind`. Of another kind nothing can be said to fit and no time can be told, unless the spec
    gives `memory`, and for times `peak_flops` and `memory_bandwidth`.
    """
    spec = context.spec
    asked: list[tuple[tuple[str, ...], Hardware | None]] = [(("learner",), spec.learner.hardware)]
    asked += [(("samplers", pool.name), pool.hardware) for pool in spec.samplers]
    asked += [(("verify",), spec.verify.hardware)]
    for where, hardware in asked:
        if hardware is None or hardware.kind in DEVICES or hardware.memory is not None:
            continue
        longer = [kind for kind in DEVICES if hardware.kind and kind.startswith(hardware.kind)]
        close = " or ".join(longer) or close_match(hardware.kind, DEVICES)
        yield Violation(
            (*where, "hardware", "kind"),
            f"{hardware.kind[:80]!r} is not known: what needs its memory is not checked",
            suggestion=f"did you mean {close}?" if close else "give its memory, like 80GB",
        )


@model_rule("step-fits", "memory")
def step_fits(context: Context, config: ModelConfig) -> Iterator[Violation]:
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
    yield Violation(
        ("learner",),
        f"a step needs {gb(needs.total)} a device, which has {gb(memory)}: "
        + ", ".join(f"{name} {gb(size)}" for name, size in held.items()),
        numbers={**held, "memory": round(memory)},
        suggestion=_relief(spec, max(held, key=held.__getitem__)),
    )


def _relief(spec: RunSpec, largest: str) -> str:
    """What to change, by the part of a step that takes most."""
    if largest == "activations" and spec.learner.remat not in ("full", "offload"):
        return "remat: full"
    if largest in ("activations", "temporaries", "logits"):
        return "fewer packing.rows, shorter rows, more context, or remat: offload"
    if largest == "weights":
        return "old_logprobs: sampler, kl: {coef: 0}, or more fsdp or tensor"
    return "more fsdp or tensor, optimizer: {offload: true}, or learner.lora"


@rule("bf16-master", "memory")
def bf16_master(context: Context) -> Iterator[Violation]:
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
        return
    if config is None and spec.optimizer.kind == "sgd":
        return
    width = WIDEST if config is None else config.hidden_size
    floor = HALF_STEP / sqrt(width)
    move = spec.optimizer.lr if config is None else weight_move(spec, config)
    if move <= floor:
        yield Violation(
            ("learner", "master_dtype"),
            f"bfloat16 rounds updates of {move:g} away: a weight of "
            f"{1 / sqrt(width):.2g} moves only by more than {floor:.2g}",
            numbers={"move": move, "floor": floor, "hidden_size": width},
            suggestion="float32",
        )
