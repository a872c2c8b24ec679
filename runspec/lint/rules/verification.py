"""Rules on verification: what the check of untrusted work needs."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from runspec.core.spec.role_names import elsewhere, validator_names
from runspec.estimate.speed import step_seconds, tokens_to_check, validator_tokens_per_s
from runspec.lint.registry import Context, Violation, rule
from runspec.lint.rules.security import untrusted_pools

EXECUTING_KINDS = ("code",)
"""Kinds of reward that execute what the model wrote."""


@rule("unsandboxed-grading", "verification")
def unsandboxed_grading(context: Context) -> Iterator[Violation]:
    """A grader that executes what the model wrote must do so in a sandbox.

        reward[].sandboxed, where its kind is code

    What comes back from an untrusted pool was written by whoever runs the worker, and the grader
    runs it beside the validator's signing key. Of trusted pools it is a warning: there the model
    alone wrote it, and a policy that is rewarded for passing tests looks for every way to.
    `sandboxed: false` makes a difference only on machines where no sandbox works (docs/sandbox.md);
    there sampler and validator refuse it too, where a pool is untrusted.
    """
    pools = untrusted_pools(context.spec)
    for term in context.spec.reward:
        if term.kind in EXECUTING_KINDS and not term.sandboxed:
            author = f"whoever runs pool {pools[0].name}" if pools else "the model"
            yield Violation(
                ("reward", term.name, "sandboxed"),
                f"kind {term.kind} would run, unconfined, what {author} wrote",
                suggestion="sandboxed: true",
                severity="error" if pools else "warning",
            )


@rule("validator-hardware", "verification")
def validator_hardware(context: Context) -> Iterator[Violation]:
    """Validators must not share the learner's accelerators.

        verify.hardware is given, where the learner is on accelerators and validators start here

    One process holds a TPU chip, and JAX takes most of a GPU's memory as it starts. A validator
    without hardware of its own would be on the learner's, and one of the two dies. Validators
    that `placement.roles` leaves to others take what their machine has.
    """
    spec = context.spec
    if (
        spec.verify.hardware is None
        and spec.learner.hardware.kind != "cpu"
        and set(validator_names(spec)) - elsewhere(spec)
    ):
        yield Violation(
            ("verify", "hardware"),
            f"is null: {spec.verify.validators} validators would be on the learner's "
            f"{spec.learner.hardware.kind}",
            suggestion="say what one validator has, like {kind: h100-80g, count: 2}",
        )


@rule("validator-capacity", "verification")
def validator_capacity(context: Context) -> Iterator[Violation]:
    """Validators must check rollouts as fast as they come.

        validators x tokens_per_s >= rollouts x length x prefill_share / step_s

    Rollouts of a step, those of filtered groups included, times their mean length, prompt and
    output, times the share that is prefilled, in the time of a step (`runspec.estimate.speed`).
    With less the queue grows from step to step: verdicts come after the lag that is allowed, and
    what was sampled expires. `tokens_per_s` is verify.tokens_per_s or follows from verify.hardware;
    silent where neither is given, or the time of a step is not known.
    """
    spec, config = context.spec, context.config
    rate, step_s = validator_tokens_per_s(spec, config), step_seconds(spec, config)
    if rate is None or step_s is None or spec.verify.validators == 0:
        return
    capacity, arriving = spec.verify.validators * rate, tokens_to_check(spec) / step_s
    if capacity < arriving:
        needed = ceil(arriving / rate)
        yield Violation(
            ("verify", "validators"),
            f"{spec.verify.validators} check {capacity:.0f} tokens/s, and {arriving:.0f} come",
            numbers={
                "validators": spec.verify.validators,
                "tokens_per_s": round(rate, 1),
                "arriving_tokens_s": round(arriving, 1),
                "step_s": float(f"{step_s:.4g}"),
            },
            suggestion=f"{needed} would do, or a smaller prefill_share",
        )
