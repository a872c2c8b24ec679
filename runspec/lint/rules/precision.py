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
