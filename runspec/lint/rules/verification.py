"""Rules on verification: what the check of untrusted work needs, precision, and its limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from runspec.core.errors import UserError
from runspec.core.schema.load import profile_text
from runspec.core.schema.role_names import elsewhere, validator_names
from runspec.core.schema.source_files import EXECUTING_KINDS
from runspec.estimate.speed import step_seconds, tokens_to_check, validator_tokens_per_s
from runspec.lint import Context, Found, Violation, relation, rule
from runspec.lint.rules.security import untrusted_pools
from verify.thresholds import CALIBRATED, precision_of

if TYPE_CHECKING:
    from verify.profile import Profile


@rule("verification")
def no_validators(context: Context) -> Found:
    """Somebody must check submissions and grade them.

        verify.validators >= 1

    Rewards that train are a validator's own (docs/verify.md); the worker's are claims.
    Without a validator no group ever gets a verdict, no step fills, and the run stalls at its first
    deadline, with a trusted pool as with an untrusted one.
    """
    return relation(
        context.spec.verify.validators >= 1,
        "verify.validators",
        "nobody would check and grade what workers send",
        "validators: 1",
    )


@rule("verification")
def untrusted_unseeded(context: Context) -> Found:
    """An untrusted pool must sample by the noise of its leases.

        token = argmax_v( logits_v / T + noise(lease, group, sample, position, v) )

    With noise that anybody can recompute, a validator can tell which token had to come. Without it
    every check still passes for a worker that draws eight answers and hands in the best, or takes
    its tokens from another model and prefills with the right one (DiFR, arXiv 2511.20621).
    """
    for pool in untrusted_pools(context.spec):
        yield from relation(
            pool.sampling.seeded,
            f"samplers.{pool.name}.sampling.seeded",
            "an untrusted pool must sample by the lease's seed: without it best-of-n cannot be "
            "told from honest work",
            "seeded: true, or trust: trusted for machines of your own",
        )


@rule("verification")
def untrusted_unproven(context: Context) -> Found:
    """Some of what an untrusted pool sends must be recomputed.

        prefill_share > 0  and  prefill_floor > 0

    Log-probs, the seeded choice of tokens and TOPLOC proofs are checked on the share of submissions
    that validators prefill. At 0 none of them is ever looked at: a worker may run any model, or
    none. A small share is enough to catch who cheats often, for a hash under the validator's key
    decides which submissions are drawn.
    """
    verify, pools = context.spec.verify, untrusted_pools(context.spec)
    for name, share, what, usual in (
        ("prefill_share", verify.prefill_share, "nothing", 1.0),
        ("prefill_floor", verify.prefill_floor, "at the best reputation nothing", 0.1),
    ):
        for pool in pools[:1]:
            yield from relation(
                share != 0.0,
                f"verify.{name}",
                f"{what} of the untrusted pool {pool.name} would ever be recomputed",
                f"{name}: {usual}",
                {name: 0.0, "untrusted_pools": len(pools)},
            )


@rule("verification")
def prefill_floor(context: Context) -> Found:
    """Good work must not be recomputed more often than a new worker's.

        prefill_floor <= prefill_share

    The share of a worker's submissions that is recomputed begins at `prefill_share` and falls to
    `prefill_floor` as its reputation grows (docs/coordinator.md). Above it, it would rise.
    """
    floor, share = context.spec.verify.prefill_floor, context.spec.verify.prefill_share
    if floor is None:
        return ()
    return relation(
        floor <= share,
        "verify.prefill_floor",
        "the share that is recomputed would grow with reputation",
        f"prefill_floor: {share}",
        {"prefill_floor": floor, "prefill_share": share},
    )


@rule("verification")
def unsandboxed_grading(context: Context) -> Found:
    """A grader that executes what the model wrote must do so in a sandbox.

        reward[].sandboxed, where its kind is code

    What comes back from an untrusted pool was written by whoever runs the worker, and the grader
    runs it beside the validator's signing key. Of trusted pools it is a warning: there the model
    alone wrote it, and a policy that is rewarded for passing tests looks for every way to.
    `sandboxed: false` makes a difference only on machines where no sandbox works (docs/sandbox.md);
    there sampler and validator refuse it too, where a pool is untrusted.
    """
    pools = untrusted_pools(context.spec)
    author = f"whoever runs pool {pools[0].name}" if pools else "the model"
    for term in context.spec.reward:
        yield from relation(
            term.kind not in EXECUTING_KINDS or term.sandboxed,
            f"reward.{term.name}.sandboxed",
            f"kind {term.kind} would run, unconfined, what {author} wrote",
            "sandboxed: true",
            severity="error" if pools else "warning",
        )


@rule("verification")
def in_flight_updates(context: Context) -> Found:
    """A rollout of an untrusted pool must be of one policy version from first token to last.

        in_flight_updates  =>  trust = trusted

    A validator prefills a rollout with the version that its lease names. Of one that went on under
    another version neither log-probs nor seeded choices nor proofs can be reproduced. Trusted pools
    name each token's version, and those rollouts are believed without a prefill.
    """
    for pool in untrusted_pools(context.spec):
        yield from relation(
            not pool.in_flight_updates,
            f"samplers.{pool.name}.in_flight_updates",
            "a validator could not reproduce a rollout that spans two versions",
            "in_flight_updates: false",
        )


@rule("verification")
def engine_hardware(context: Context) -> Found:
    """The prefill engine must run on the validators' hardware.

        engine = torch  =>  verify.hardware is no TPU

    The torch engine runs on a CPU or on GPUs; the JAX engine on any backend. Silent where
    `verify.hardware` is null: the engine takes what it finds.
    """
    verify = context.spec.verify
    if verify.engine != "torch" or verify.hardware is None:
        return ()
    return relation(
        not verify.hardware.kind.startswith("tpu"),
        "verify.engine",
        f"torch runs on CPUs and GPUs, not on {verify.hardware.kind}",
        "engine: jax",
    )


@rule("verification")
def validator_hardware(context: Context) -> Found:
    """Validators must not share the learner's accelerators.

        verify.hardware is given, where the learner is on accelerators and validators start here

    One process holds a TPU chip, and JAX takes most of a GPU's memory as it starts. A validator
    without hardware of its own would be on the learner's, and one of the two dies. Validators
    that `placement.roles` leaves to others take what their machine has.
    """
    spec = context.spec
    kind, here = spec.learner.hardware.kind, set(validator_names(spec)) - elsewhere(spec)
    return relation(
        spec.verify.hardware is not None or kind == "cpu" or not here,
        "verify.hardware",
        f"is null: {spec.verify.validators} validators would be on the learner's {kind}",
        "say what one validator has, like {kind: h100-80g, count: 2}",
    )


@rule("verification")
def validator_capacity(context: Context) -> Found:
    """Validators must check rollouts as fast as they come.

        validators x tokens_per_s >= rollouts x length x prefill_share / step_s

    Rollouts of a step, those of filtered groups included, times their mean length, prompt and
    output, times the share that is prefilled, in the time of a step (`runspec.estimate.speed`).
    With less the queue grows from step to step: verdicts come after the lag that is allowed, and
    what was sampled expires. `tokens_per_s` is verify.tokens_per_s or follows from verify.hardware;
    silent where neither is given, or the time of a step is not known.
    """
    spec, count = context.spec, context.spec.verify.validators
    rate, step_s = validator_tokens_per_s(spec, context.config), step_seconds(spec, context.config)
    if not rate or not step_s or count == 0:
        return ()
    arriving = tokens_to_check(spec) / step_s
    return relation(
        count * rate >= arriving,
        "verify.validators",
        f"{count} check {count * rate:.0f} tokens/s, and {arriving:.0f} come",
        f"{-(-arriving // rate):.0f} would do, or a smaller prefill_share",
        {
            "validators": count,
            "tokens_per_s": round(rate, 1),
            "arriving_tokens_s": round(arriving, 1),
            "step_s": float(f"{step_s:.4g}"),
        },
    )


@rule("verification")
def uncalibrated_precision(context: Context) -> Found:
    """Proofs may be asked of a pool only where somebody measured what honest ones look like.

        (sampler, validator) is calibrated, or verify.profiles has one for the pool, or
        verify.thresholds names the sampler's precision

    The sampler's precision is its quantization or its dtype, the validator's `compute_dtype` of the
    learner. Measured here were float32 against float32, and bfloat16 against either
    (docs/verify.md). fp8 (e4m3) keeps 3 bits of a mantissa where bfloat16 keeps 7: honest work may
    well break the limits of bfloat16. float32 against bfloat16 has those limits too, untested.
    `python -m verify calibrate` measures a pool and writes a profile.
    """
    spec = context.spec
    given = {limits.name for limits in spec.verify.thresholds}
    profiles = [found for found in _profiles(context).values() if not isinstance(found, str)]
    validator = spec.learner.compute_dtype
    for pool in spec.samplers:
        sampler = precision_of(pool)
        calibrated = (sampler, validator) in CALIBRATED or sampler in given
        calibrated |= any(
            not (profile.differences(spec, pool) or profile.devices(pool)) for profile in profiles
        )
        if spec.verify.prefill_share > 0.0 and not calibrated:
            yield Violation(
                ("samplers", pool.name, "quantization" if pool.quantization else "dtype"),
                f"nobody measured what {sampler} looks like to a validator that computes in "
                f"{validator}",
                numbers={
                    "sampler": sampler,
                    "validator": validator,
                    "prefill_share": spec.verify.prefill_share,
                },
                suggestion="measure honest rollouts with `python -m verify calibrate` and name the "
                f"profile in verify.profiles, or limits in verify.thresholds, {sampler}",
            )


@rule("verification")
def calibration_profile(context: Context) -> Found:
    """A profile must be signed by the run's root key, in date, and of this run's pools and model.

        signed by identity.root_public_key,   now <= expires,   one profile a pair
        limits <= verify.loosest * published limits

    A profile says by which limits strangers are judged (docs/verify.md, "Calibration"), so nobody
    but the root may sign one. It holds for the engine and precision of samplers and validators that
    it was measured with, for the devices of both, for its temperature, top-p and top-k, and for
    models of that size: where any of these differs, the numbers of honest rollouts do too. One that
    covers no pool is never read, which is a warning: the pools have the published limits.
    """
    covered: dict[str, str] = {}
    for name, profile in _profiles(context).items():
        where = ("verify", "profiles", name)
        if isinstance(profile, str):
            yield Violation(
                where,
                profile,
                suggestion="calibrate again, or have the root sign it with `python -m verify "
                "sign-profile`",
            )
        else:
            loosest = context.spec.verify.loosest
            if loose := profile.above_published(loosest):
                yield Violation(
                    where,
                    f"{', '.join(loose)} above verify.loosest times the published limits",
                    numbers={"loosest": loosest},
                    suggestion="take it out, or raise verify.loosest for whoever says that it has "
                    "such devices",
                )
            yield from _misplaced(context, where, profile, covered)


def _misplaced(
    context: Context, where: tuple[str, ...], profile: Profile, covered: dict[str, str]
) -> Iterator[Violation]:
    spec = context.spec
    differences = {pool.name: profile.differences(spec, pool) for pool in spec.samplers}
    pools = [name for name, found in differences.items() if not found]
    if not pools:
        nearest = min(differences, key=lambda name: len(differences[name]))
        yield Violation(
            where,
            f"covers no pool; for {nearest} it was measured with {differences[nearest][0]}",
            suggestion="calibrate with the pool as it is, or take it out",
            severity="warning",
        )
    for pool in (each for each in spec.samplers if each.name in pools):
        pair = f"{pool.name} {profile.devices(pool)}".strip()
        if pair in covered:
            yield Violation(
                where,
                f"covers pool {pair}, as {covered[pair]} does",
                suggestion="take one of them out",
            )
        covered.setdefault(pair, where[-1])
    for what, measured in profile.model.model_dump().items() if context.config else ():
        here = getattr(context.config, what)
        if here != measured:
            yield Violation(
                where,
                f"was measured on a model with {what} {measured}; this one has {here}",
                suggestion="calibrate with the run's model",
            )


def _profiles(context: Context) -> dict[str, Profile | str]:
    """Each profile by its name, or what is wrong with it."""
    if not context.spec.verify.profiles:
        return {}
    # Imported where there is a profile: keys and classes take time.
    from runspec.core.signed import BadSignature
    from verify.profile import open_profile

    root = context.spec.identity.root_public_key
    found: dict[str, Profile | str] = {}
    for item in context.spec.verify.profiles:
        if root is None:
            found[item.name] = "identity.root_public_key is null: no signature could be checked"
            continue
        try:
            text = profile_text(item, context.folder)
            found[item.name] = open_profile(text.encode("utf-8", "replace"), root_public_key=root)
        except (UserError, BadSignature) as error:
            found[item.name] = error.thing if isinstance(error, UserError) else str(error)
    return found


@rule("verification", "warning")
def unused_thresholds(context: Context) -> Found:
    """Thresholds should be of a precision that some pool has.

    Limits are looked up by the pool's precision, its quantization or its dtype. Those of a
    precision that no pool has are never read: the limits of the pools are others than they seem.
    """
    present = sorted({precision_of(pool) for pool in context.spec.samplers})
    for limits in context.spec.verify.thresholds:
        yield from relation(
            limits.name in present,
            f"verify.thresholds.{limits.name}",
            f"no pool computes in {limits.name}; there is {', '.join(present)}",
            "take it out, or rename it to a precision that a pool has",
        )


@rule("verification")
def thresholds_order(context: Context) -> Found:
    """The limit of a mean must not exceed the limit of its parts.

        logprob_submission <= logprob_rollout,   gap_mean <= gap <= gap_max

    A submission's mean spreads less than a rollout's, and a mean gap less than a single token's. A
    looser limit on the mean can never be the one that decides, and `gap_max` below `gap` leaves
    `gap_share` without meaning: the two were exchanged.
    """
    for limits in context.spec.verify.thresholds:
        for low, high in (
            ("logprob_submission", "logprob_rollout"),
            ("gap_mean", "gap"),
            ("gap", "gap_max"),
        ):
            below, above = getattr(limits, low), getattr(limits, high)
            yield from relation(
                below <= above,
                f"verify.thresholds.{limits.name}.{low}",
                f"{below:g} is above {high} = {above:g}",
                "exchange them, or measure again",
                {low: below, high: above},
            )
