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


@rule("no-validators", "verification")
def no_validators(context: Context) -> Iterator[Violation]:
    """Somebody must check submissions and grade them.

        verify.validators >= 1

    Rewards that train are a validator's own (docs/verify.md); the worker's are claims.
    Without a validator no group ever gets a verdict, no step fills, and the run stalls at its first
    deadline, with a trusted pool as with an untrusted one.
    """
    if context.spec.verify.validators == 0:
        yield Violation(
            ("verify", "validators"),
            "nobody would check and grade what workers send",
            suggestion="validators: 1",
        )


@rule("untrusted-unseeded", "verification")
def untrusted_unseeded(context: Context) -> Iterator[Violation]:
    """An untrusted pool must sample by the noise of its leases.

        token = argmax_v( logits_v / T + noise(lease, group, sample, position, v) )

    With noise that anybody can recompute, a validator can tell which token had to come. Without it
    every check still passes for a worker that draws eight answers and hands in the best, or takes
    its tokens from another model and prefills with the right one (DiFR, arXiv 2511.20621).
    """
    for pool in untrusted_pools(context.spec):
        if not pool.sampling.seeded:
            yield Violation(
                ("samplers", pool.name, "sampling", "seeded"),
                "an untrusted pool must sample by the lease's seed: without it best-of-n cannot "
                "be told from honest work",
                suggestion="seeded: true, or trust: trusted for machines of your own",
            )


@rule("untrusted-unproven", "verification")
def untrusted_unproven(context: Context) -> Iterator[Violation]:
    """Some of what an untrusted pool sends must be recomputed.

        prefill_share > 0  and  prefill_floor > 0

    Log-probs, the seeded choice of tokens and TOPLOC proofs are checked on the share of submissions
    that validators prefill. At 0 none of them is ever looked at: a worker may run any model, or
    none. A small share is enough to catch who cheats often, for a hash under the validator's key
    decides which submissions are drawn.
    """
    verify, pools = context.spec.verify, untrusted_pools(context.spec)
    for name, share in (
        ("prefill_share", verify.prefill_share),
        ("prefill_floor", verify.prefill_floor),
    ):
        if share == 0.0 and pools:
            who = "nothing" if name == "prefill_share" else "at the best reputation nothing"
            yield Violation(
                ("verify", name),
                f"{who} of the untrusted pool {pools[0].name} would ever be recomputed",
                numbers={name: share, "untrusted_pools": len(pools)},
                suggestion=f"{name}: {1.0 if name == 'prefill_share' else 0.1}",
            )


@rule("prefill-floor", "verification")
def prefill_floor(context: Context) -> Iterator[Violation]:
    """Good work must not be recomputed more often than a new worker's.

        prefill_floor <= prefill_share

    The share of a worker's submissions that is recomputed begins at `prefill_share` and falls to
    `prefill_floor` as its reputation grows (docs/coordinator.md). Above it, it would rise.
    """
    floor, share = context.spec.verify.prefill_floor, context.spec.verify.prefill_share
    if floor is not None and floor > share:
        yield Violation(
            ("verify", "prefill_floor"),
            "the share that is recomputed would grow with reputation",
            numbers={"prefill_floor": floor, "prefill_share": share},
            suggestion=f"prefill_floor: {share}",
        )


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


@rule("in-flight-updates", "verification")
def in_flight_updates(context: Context) -> Iterator[Violation]:
    """A rollout of an untrusted pool must be of one policy version from first token to last.

        in_flight_updates  =>  trust = trusted

    A validator prefills a rollout with the version that its lease names. Of one that went on under
    another version neither log-probs nor seeded choices nor proofs can be reproduced. Trusted pools
    name each token's version, and those rollouts are believed without a prefill.
    """
    for pool in context.spec.samplers:
        if pool.in_flight_updates and pool.trust == "untrusted":
            yield Violation(
                ("samplers", pool.name, "in_flight_updates"),
                "a validator could not reproduce a rollout that spans two versions",
                suggestion="in_flight_updates: false",
            )


@rule("engine-hardware", "verification")
def engine_hardware(context: Context) -> Iterator[Violation]:
    """The prefill engine must run on the validators' hardware.

        engine = torch  =>  verify.hardware is no TPU

    The torch engine runs on a CPU or on GPUs; the JAX engine on any backend. Silent where
    `verify.hardware` is null: the engine takes what it finds.
    """
    verify = context.spec.verify
    if verify.engine == "torch" and verify.hardware and verify.hardware.kind.startswith("tpu"):
        yield Violation(
            ("verify", "engine"),
            f"torch runs on CPUs and GPUs, not on {verify.hardware.kind}",
            suggestion="engine: jax",
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
