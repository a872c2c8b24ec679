"""Chooses the limits of a pool: those of the spec, of a profile, or the published ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from runspec.core.errors import UserError
from runspec.core.signed import BadSignature
from runspec.core.spec.schema import RunSpec, SamplerPool
from verify.profile import Profile, open_profile
from verify.thresholds import GapNoise, Limits, limits_for, precision_of

_OF_GAPS = ("gap", "gap_share", "gap_max", "gap_mean", "gap_noise")
"""Limits of gaps. A pool without a seed has no gaps, and the published limits apply there; the rest
of a seeded pool's profile holds for its log-probs and proofs."""


def profiles_of(spec: RunSpec, *, dated: bool = True) -> dict[str, Profile]:
    """Return the profiles of a resolved spec by name, each checked against its root key.

    Args:
        spec: the resolved spec.
        dated: whether the profiles must be valid now.

    Raises:
        UserError: a profile is not valid, or the spec pins no root key.
    """
    root = spec.identity.root_public_key
    found: dict[str, Profile] = {}
    for item in spec.verify.profiles:
        place = f"verify.profiles.{item.name}"
        if root is None or item.document is None:
            lacking = "identity.root_public_key" if root is None else "its contents"
            raise UserError(
                f"a profile, and the resolved spec lacks {lacking}",
                place=place,
                remedy="pin the root key that signed it, and apply the spec again",
            )
        try:
            document = item.document.encode("utf-8", "replace")
            found[item.name] = open_profile(document, root_public_key=root, dated=dated)
        except BadSignature as error:
            raise UserError(
                f"cannot be verified: {error}",
                place=place,
                remedy="calibrate again, and sign with the run's root key",
            ) from error
    return found


def limits_by_pool(spec: RunSpec, *, dated: bool = True) -> dict[str, Limits]:
    """Return the limits of each pool; arguments and errors are those of `profiles_of`."""
    profiles = profiles_of(spec, dated=dated)
    return {pool.name: _limits(spec, pool, profiles) for pool in spec.samplers}


def gap_noise_by_pool(spec: RunSpec) -> dict[str, GapNoise]:
    """Return the noise of gaps of each calibrated pool with seeded sampling.

    Expired profiles count too: the validators, which use all limits, check the dates.

    Raises:
        UserError: see `profiles_of`.
    """
    limits = limits_by_pool(spec, dated=False)
    return {pool: each.gap_noise for pool, each in limits.items() if each.gap_noise}


def require_profiles(spec: RunSpec, *, root_public_key: str) -> None:
    """Require that the root key that this process pins has signed the spec's profiles.

    Raises:
        UserError: another root has, or a profile is not valid.
    """
    pinned = spec.identity.root_public_key
    if spec.verify.profiles and pinned != root_public_key:
        raise UserError(
            f"profiles are signed by root {str(pinned)[:16]}, and {root_public_key[:16]} is pinned",
            place="verify.profiles",
            remedy="start with the root key of the spec, or calibrate under this one",
        )
    profiles_of(spec)


def require_model(spec: RunSpec, config: Mapping[str, object]) -> None:
    """Require that the profiles were measured on a model of the same size.

    Args:
        spec: the resolved spec.
        config: config.json of a policy version.

    Raises:
        UserError: a profile was measured on another size.
    """
    for name, profile in profiles_of(spec).items():
        for what, measured in profile.model.model_dump().items():
            if config.get(what) != measured:
                raise UserError(
                    f"measured on a model with {what} {measured}; this one has {config.get(what)}",
                    place=f"verify.profiles.{name}",
                    remedy="calibrate with the run's model",
                )


def sources_by_pool(spec: RunSpec) -> dict[str, str]:
    """Return the source of each pool's limits, for people.

    Raises:
        UserError: see `profiles_of`.
    """
    profiles = profiles_of(spec)
    return {pool.name: _source(spec, pool, profiles) for pool in spec.samplers}


def _limits(spec: RunSpec, pool: SamplerPool, profiles: Mapping[str, Profile]) -> Limits:
    name = _covering(spec, pool, profiles)
    published = limits_for(precision_of(pool), spec.learner.compute_dtype, spec.verify.thresholds)
    if name is None or _is_given(spec, pool):
        return published
    measured = profiles[name].as_limits()
    if pool.sampling.seeded:
        return measured
    return replace(measured, **{each: getattr(published, each) for each in _OF_GAPS})


def _source(spec: RunSpec, pool: SamplerPool, profiles: Mapping[str, Profile]) -> str:
    if _is_given(spec, pool):
        return f"verify.thresholds.{precision_of(pool)}"
    name = _covering(spec, pool, profiles)
    if name is None:
        return "the published ones"
    until = datetime.fromtimestamp(profiles[name].expires, UTC).date()
    looser = profiles[name].looser
    more = f", looser than published in {', '.join(looser)}" if looser else ""
    return f"verify.profiles.{name}, until {until}{more}"


def _is_given(spec: RunSpec, pool: SamplerPool) -> bool:
    return any(given.name == precision_of(pool) for given in spec.verify.thresholds)


def _covering(spec: RunSpec, pool: SamplerPool, profiles: Mapping[str, Profile]) -> str | None:
    """Return the name of the first profile that matches a pool and its validators."""
    covering = (name for name, each in profiles.items() if not each.differences(spec, pool))
    return next(covering, None)
