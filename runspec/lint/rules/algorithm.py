"""What is optimised: batches, clip bounds, learning rates, penalties."""

from __future__ import annotations

from collections.abc import Iterator

from runspec.lint.registry import Context, Violation, rule


@rule("updates-divide-batch", "algorithm")
def updates_divide_batch(context: Context) -> Iterator[Violation]:
    """The rollouts of a step must divide evenly into its optimizer updates."""
    spec = context.spec
    algorithm = spec.algorithm
    rollouts = algorithm.prompts_per_step * algorithm.group_size
    if rollouts % algorithm.updates_per_step:
        yield Violation(
            ("algorithm", "updates_per_step"),
            f"{algorithm.updates_per_step} does not divide the {rollouts} rollouts of a step "
            f"({algorithm.prompts_per_step} prompts x {algorithm.group_size})",
        )


@rule("clip-bounds", "algorithm")
def clip_bounds(context: Context) -> Iterator[Violation]:
    """The clip bounds must leave room around a ratio of 1."""
    spec = context.spec
    clip, cispo = spec.algorithm.clip, spec.algorithm.surrogate == "cispo"
    if clip.delta is not None and clip.delta <= 1 + clip.eps_high and not cispo:
        yield Violation(
            ("algorithm", "clip", "delta"),
            f"{clip.delta:g} must be greater than 1 + eps_high = {1 + clip.eps_high:g}",
        )
    # CISPO's weight may go without a lower bound, and its authors' does.
    if clip.eps_low >= 1 and not cispo:
        yield Violation(("algorithm", "clip", "eps_low"), f"{clip.eps_low:g} must be less than 1")


@rule("cispo", "algorithm")
def cispo(context: Context) -> Iterator[Violation]:
    """CISPO weighs tokens by their own clipped ratio: it takes no sequence ratio and no delta."""
    spec = context.spec
    algorithm = spec.algorithm
    if algorithm.surrogate != "cispo":
        return
    if algorithm.ratio != "token":
        yield Violation(
            ("algorithm", "ratio"),
            "surrogate: cispo weighs each token by its own ratio: it goes with ratio: token",
        )
    if algorithm.clip.delta is not None:
        yield Violation(
            ("algorithm", "clip", "delta"),
            f"{algorithm.clip.delta:g} has no part in surrogate: cispo, whose weight 1 + eps_high "
            "bounds; set it to null",
        )


@rule("stale-pi-old", "algorithm", "warning")
def stale_pi_old(context: Context) -> Iterator[Violation]:
    """A single update a step with recomputed pi_old has no bound against lag."""
    spec = context.spec
    algorithm = spec.algorithm
    recomputed = algorithm.old_logprobs == "recompute" and algorithm.importance.cap is None
    if recomputed and algorithm.updates_per_step == 1 and algorithm.async_level > 0:
        yield Violation(
            ("algorithm", "old_logprobs"),
            "in the only update of a step the recomputed ratio is 1: no clip acts, and nothing "
            f"corrects a lag of up to {algorithm.async_level}; old_logprobs: sampler or "
            "importance.cap does",
        )


@rule("importance-cap", "algorithm")
def importance_cap(context: Context) -> Iterator[Violation]:
    """The importance weight corrects recomputed pi_old only."""
    spec = context.spec
    if spec.algorithm.importance.cap is not None and spec.algorithm.old_logprobs == "sampler":
        yield Violation(
            ("algorithm", "importance", "cap"),
            "with old_logprobs: sampler the weight pi_old / mu is 1 everywhere; "
            "it corrects old_logprobs: recompute",
        )


@rule("one-temperature", "algorithm")
def one_temperature(context: Context) -> Iterator[Violation]:
    """All pools sample at one temperature, which the loss uses too."""
    spec = context.spec
    first = spec.samplers[0]
    for pool in spec.samplers[1:]:
        if pool.sampling.temperature != first.sampling.temperature:
            yield Violation(
                ("samplers", pool.name, "sampling", "temperature"),
                f"{pool.sampling.temperature:g} differs from {first.sampling.temperature:g} of "
                f"pool {first.name}: the loss knows one temperature",
            )
