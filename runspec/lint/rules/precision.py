"""Rules on precision: types of pools, and the thresholds of their proofs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from runspec.core.errors import UserError
from runspec.core.spec.resolved import profile_text
from runspec.lint.registry import Context, Violation, rule
from verify.thresholds import CALIBRATED, precision_of

if TYPE_CHECKING:
    from verify.profile import Profile


@rule("uncalibrated-precision", "verification")
def uncalibrated_precision(context: Context) -> Iterator[Violation]:
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
        calibrated |= any(not profile.differences(spec, pool) for profile in profiles)
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


@rule("calibration-profile", "verification")
def calibration_profile(context: Context) -> Iterator[Violation]:
    """A profile must be signed by the run's root key, in date, and of this run's pools and model.

        signed by identity.root_public_key,   now <= expires,   one profile a pool

    A profile says by which limits strangers are judged (docs/verify.md, "Calibration"), so nobody
    but the root may sign one. It holds for the engine, precision and hardware of samplers and
    validators that it was measured with, for its temperature, top-p and top-k, and for models of
    that size: where any of these differs, the numbers of honest rollouts do too. One that covers no
    pool is never read, which is a warning: the pools have the published limits.
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
    for name in pools:
        if name in covered:
            yield Violation(
                where,
                f"covers pool {name}, as {covered[name]} does",
                suggestion="take one of them out",
            )
        covered.setdefault(name, where[-1])
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
        except UserError as error:
            found[item.name] = error.thing
        except BadSignature as error:
            found[item.name] = str(error)
    return found


@rule("unused-thresholds", "verification", "warning")
def unused_thresholds(context: Context) -> Iterator[Violation]:
    """Thresholds should be of a precision that some pool has.

    Limits are looked up by the pool's precision, its quantization or its dtype. Those of a
    precision that no pool has are never read: the limits of the pools are others than they seem.
    """
    present = {precision_of(pool) for pool in context.spec.samplers}
    for limits in context.spec.verify.thresholds:
        if limits.name not in present:
            yield Violation(
                ("verify", "thresholds", limits.name),
                f"no pool computes in {limits.name}; there is {', '.join(sorted(present))}",
                suggestion="take it out, or rename it to a precision that a pool has",
            )


@rule("thresholds-order", "verification")
def thresholds_order(context: Context) -> Iterator[Violation]:
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
            if below > above:
                yield Violation(
                    ("verify", "thresholds", limits.name, low),
                    f"{below:g} is above {high} = {above:g}",
                    numbers={low: below, high: above},
                    suggestion="exchange them, or measure again",
                )


@rule("quantized-pool", "samplers")
def quantized_pool(context: Context) -> Iterator[Violation]:
    """A quantised pool must be on GPUs, and of dtype bfloat16 beside the quantised matrices.

    vLLM 0.32 rounds matrices to fp8 as it loads them, and leaves norms, embeddings and activations
    between matrix products in `dtype`, for which its kernels take bfloat16. Its CPU build accepts
    the option and dies in the first load: the kernel is not in it. Workers refuse such a pool.
    """
    for pool in context.spec.samplers:
        where = ("samplers", pool.name)
        if pool.quantization is not None and pool.hardware.kind == "cpu":
            yield Violation(
                (*where, "quantization"),
                f"vLLM does not quantise to {pool.quantization} on CPUs",
                suggestion="set it to null",
            )
        if pool.quantization is not None and pool.dtype != "bfloat16":
            yield Violation(
                (*where, "dtype"),
                f"{pool.quantization} matrices go with bfloat16 beside them, not {pool.dtype}",
                suggestion="dtype: bfloat16",
            )
