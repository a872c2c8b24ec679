"""Rules on the optimizer: learning rates, schedules, decays of AdamW's means."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.estimate.assumed import LORA_GAIN, weight_move
from runspec.lint.registry import Context, Violation, rule

LEAST_MOVE, LARGEST_MOVE = 5e-5, 0.5
"""Move of a weight x hidden size between which fine-tuning is known to work."""
FROM_NOTHING = 10.0
"""How much larger both are where a model of random weights trains on documents."""
NARROWEST, WIDEST = 64, 16384
"""Hidden sizes between which a model lies whose shape is not known."""
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
