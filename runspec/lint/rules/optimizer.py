"""How far an update goes: learning rates, their warm-up, the decays of AdamW's means."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.estimate.assumed import LORA_GAIN
from runspec.lint.registry import Context, Violation, rule

LEAST_MOVE, LARGEST_MOVE = 5e-5, 0.5
"""lr x hidden size between which fine-tuning is known to work."""
NARROWEST, WIDEST = 64, 16384
"""Hidden sizes between which a model lies whose shape is not known."""


@rule("learning-rate", "algorithm", "warning")
def learning_rate(context: Context) -> Iterator[Violation]:
    """The learning rate must lie in the band in which fine-tuning is known to work.

        5e-5 <= lr x D <= 0.5        D the hidden size; with LoRA lr / 10 in the place of lr

    AdamW moves every weight by about lr an update. Where those moves agree in sign, D of them add
    up in each activation, so lr x D is about the relative change of the activations by one update
    (hence Adam's rate goes as 1 / width: Tensor Programs V, arXiv 2203.03466). Above a half a
    single update replaces what the model knows; below 5e-5 hundreds of updates do nothing. At 32B
    (D = 5120) the band is 1e-8 to 1e-4, at D = 64 it is 8e-7 to 8e-3.

    Inside: INTELLECT-2 3e-7 at D = 5120 (1.5e-3), DeepSeekMath 1e-6 at 4096 (4e-3, arXiv
    2402.03300), DAPO 1e-6 at 5120 (arXiv 2503.14476), the laptop profile 5e-4 at 64 (0.03).
    Adapters want about ten times the rate ("LoRA Without Regret", Thinking Machines, 2025). Of a
    model whose shape is not known D is taken as 64 for the upper bound and 16384 for the lower.
    """
    spec, config = context.spec, context.config
    width = None if config is None else config.hidden_size
    gain = LORA_GAIN if spec.learner.lora else 1.0
    least = gain * LEAST_MOVE / (width or WIDEST)
    largest = gain * LARGEST_MOVE / (width or NARROWEST)
    lr = spec.optimizer.lr
    if least <= lr <= largest:
        return
    of = f"a hidden size of {width}" if width else "any usual model"
    yield Violation(
        ("optimizer", "lr"),
        f"{lr:g} is {'below' if lr < least else 'above'} what trains {of}"
        + (" with adapters" if spec.learner.lora else ""),
        numbers={"lr": lr, "least": least, "largest": largest},
        requires=f"{least:.2g} <= lr <= {largest:.2g}",
        suggestion="published runs of 7B to 32B use 3e-7 to 1e-6, adapters 1e-5 to 2e-4",
    )


@rule("warmup-length", "algorithm", "warning")
def warmup_length(context: Context) -> Iterator[Violation]:
    """The warm-up must end before the run does.

        warmup_updates < steps x updates_per_step

    Update n = 0, 1, ... has the rate lr x min(1, (n + 1) / warmup_updates). A run that ends with
    the warm-up, or inside it, trains one update at the rate that the spec names, or none.
    """
    spec = context.spec
    updates = spec.steps * spec.algorithm.updates_per_step
    warmup = spec.optimizer.warmup_updates
    if warmup >= updates:
        yield Violation(
            ("optimizer", "warmup_updates"),
            f"{warmup} updates of warm-up, but {spec.steps} steps x "
            f"{spec.algorithm.updates_per_step} make {updates}: the last has "
            f"{updates / warmup:.0%} of the learning rate",
            numbers={
                "warmup_updates": warmup,
                "steps": spec.steps,
                "updates_per_step": spec.algorithm.updates_per_step,
            },
            requires="warmup_updates < steps x updates_per_step",
            suggestion=f"{max(updates // 20, 1)} is a twentieth of the run",
        )


@rule("adam-betas", "algorithm")
def adam_betas(context: Context) -> Iterator[Violation]:
    """AdamW's decays must be below 1.

        m = beta m + (1 - beta) g,   m^ = m / (1 - beta^(n + 1))     (arXiv 1711.05101)

    At beta = 1 the mean never takes in a gradient, and its correction divides by 0: the first
    update is 0 / 0 and every one is skipped as not finite.
    """
    for index, beta in enumerate(context.spec.optimizer.betas, start=1):
        if beta >= 1:
            yield Violation(
                ("optimizer", "betas"),
                f"beta{index} = {beta:g} divides by 1 - beta{index}^n = 0",
                numbers={f"beta{index}": beta},
                requires=f"beta{index} < 1",
                suggestion="[0.9, 0.95]",
            )
