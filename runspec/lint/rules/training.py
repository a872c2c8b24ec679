"""Rules on device memory, on numbers that rounding would lose, and on learning rates.

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
from runspec.estimate.assumed import LORA_GAIN, weight_move
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


LEAST_MOVE, LARGEST_MOVE = 5e-5, 0.5
"""Move of a weight x hidden size between which fine-tuning is known to work."""
FROM_NOTHING = 10.0
"""How much larger both are where a model of random weights trains on documents."""
NARROWEST = 64
"""Hidden size taken for a model whose shape is not known: it has the largest weights."""
USERS = {
    "betas": ("kind", ("adamw", "muon")),
    "eps": ("kind", ("adamw", "muon")),
    "momentum": ("kind", ("sgd", "muon")),
    "decay_updates": ("schedule", ("linear", "cosine", "wsd")),
    "final_lr": ("schedule", ("linear", "cosine", "wsd")),
}
"""Fields that only some values of `kind` or `schedule` use."""


@rule("learning-rate", "algorithm", "warning")
def learning_rate(context: Context) -> Iterator[Violation]:
    """The learning rate must lie in the band in which training is known to work.

        5e-5 <= move x D <= 0.5        D the hidden size; ten times that for `model.shape` under
                                       `pretrain` and `sft`
        adamw   move = lr, as with muon, whose updates have the same size
        sgd     move = lr clip_norm / ((1 - momentum) sqrt(P)),  P trained parameters

    With LoRA lr / 10 takes the place of lr. AdamW moves every weight by about lr an update; with
    sgd P weights share a move whose norm is at most lr clip_norm / (1 - momentum). Where moves
    agree in sign, D of them add up in each activation, so move x D is about the relative change of
    the activations by one update (hence Adam's rate goes as 1 / width: Tensor Programs V, arXiv
    2203.03466). Above a half a single update replaces what the model knows; below 5e-5 hundreds of
    updates do nothing. At 32B (D = 5120) AdamW's band is 1e-8 to 1e-4, at D = 64 it is 8e-7 to
    8e-3; that of sgd at 32B, with clip_norm 1 and momentum 0.95, is 9e-5 to 0.9.

    Inside: INTELLECT-2 3e-7 at D = 5120 (1.5e-3), DeepSeekMath 1e-6 at 4096 (4e-3, arXiv
    2402.03300), DAPO 1e-6 at 5120 (arXiv 2503.14476), the laptop profile 5e-4 at 64 (0.03).
    Random weights hold nothing that an update could replace: Llama 7B 3e-4 at 4096 (1.2, arXiv
    2302.13971), METAGENE-1 6e-4 at 4096 (2.5, arXiv 2501.02045). Adapters want about ten times the
    rate ("LoRA Without Regret", Thinking Machines, 2025). Of a model whose shape is not known D is
    taken as 64 for the upper bound and 16384 for the lower, and sgd is not looked at.
    """
    spec, config = context.spec, context.config
    optimizer, lr, gain = spec.optimizer, spec.optimizer.lr, LORA_GAIN if spec.learner.lora else 1.0
    if config is None and optimizer.kind == "sgd":
        return
    width = None if config is None else config.hidden_size
    # The rate that moves a weight by 1.
    unit = gain if config is None else lr / weight_move(spec, config)
    if spec.supervised is not None and spec.model.shape is not None:
        unit *= FROM_NOTHING
    least = unit * LEAST_MOVE / (width or WIDEST)
    largest = unit * LARGEST_MOVE / (width or NARROWEST)
    if least <= lr <= largest:
        return
    of = f"a hidden size of {width}" if width else "any usual model"
    yield Violation(
        ("optimizer", "lr"),
        f"{lr:g} is {'below' if lr < least else 'above'} what trains {of} with {optimizer.kind}"
        + (" and adapters" if spec.learner.lora else ""),
        numbers={"lr": lr, "least": least, "largest": largest},
        suggestion="published runs of 7B to 32B use AdamW at 3e-7 to 1e-6, adapters 1e-5 to 2e-4"
        if spec.supervised is None
        else "published runs of 7B use AdamW at 1e-5 to tune and 3e-4 from random weights",
    )


@rule("optimizer-fields", "algorithm")
def optimizer_fields(context: Context) -> Iterator[Violation]:
    """The optimizer's fields must be those that its kind and schedule use.

        betas, eps                 kind: adamw or muon
        momentum                   kind: sgd or muon
        decay_updates, final_lr    schedule: linear, cosine or wsd, which need decay_updates

    A field that is not used must keep its default: a value there was meant for another kind.
    """
    optimizer = context.spec.optimizer
    for name, (tag, users) in USERS.items():
        value, chosen = getattr(optimizer, name), getattr(optimizer, tag)
        if chosen not in users and value != type(optimizer).model_fields[name].default:
            yield Violation(
                ("optimizer", name),
                f"{tag}: {chosen} does not use {name}",
                suggestion="remove it",
            )
    if optimizer.schedule != "constant" and optimizer.decay_updates is None:
        yield Violation(
            ("optimizer", "schedule"),
            f"{optimizer.schedule} needs decay_updates, the length of its decay",
            suggestion="for linear and cosine the updates after the warm-up, for wsd a fifth",
        )
