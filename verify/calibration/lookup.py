"""Which limits a pool is judged by: the spec's own, a profile's, or the published ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime

from runspec.core.errors import UserError
from runspec.core.signed import BadSignature
from runspec.core.spec.schema import RunSpec, SamplerPool
from verify.calibration.profile import Profile, open_profile
from verify.thresholds import GapNoise, Limits, limits_for, precision_of


def profiles_of(spec: RunSpec, *, dated: bool = True) -> dict[str, Profile]:
    """The profiles of a resolved spec by name, each checked against its root key.

    Args:
        spec: the resolved spec.
        dated: whether they must be valid now; a ledger is read by those of its time.

    Raises:
        UserError: one is not to be believed, or the spec pins no root key.
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
                f"not to be believed: {error}",
                place=place,
                remedy="calibrate again, and sign with the run's root key",
            ) from error
    return found


def limits_by_pool(spec: RunSpec, *, dated: bool = True) -> dict[str, Limits]:
    """Return the limits of each pool; arguments and errors are those of `profiles_of`."""
    profiles = profiles_of(spec, dated=dated)
    return {pool.name: _limits(spec, pool, profiles) for pool in spec.samplers}


def gap_noise_by_pool(spec: RunSpec) -> dict[str, GapNoise]:
    """For each pool that was calibrated and samples seeded. Whether a profile is still valid is the
    validators' matter, who judge by all of it.

    Raises:
        UserError: see `profiles_of`.
    """
    limits = limits_by_pool(spec, dated=False)
    return {pool: each.gap_noise for pool, each in limits.items() if each.gap_noise}


def require_profiles(spec: RunSpec, *, root_public_key: str) -> None:
    """Refuses a spec whose profiles another root has signed than the one that this process pins.

    Raises:
        UserError: so it is, or a profile is not to be believed.
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
    """Refuses profiles of a model of another size.

    Args:
        spec: the resolved spec.
        config: the config.json of a policy version.

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
    """Where each pool's limits come from, for people.

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
    return measured if pool.sampling.seeded else _without_gaps(measured, published)


def _without_gaps(measured: Limits, published: Limits) -> Limits:
    """Those of a pool that is not seeded: of a seeded one's profile its log-probs and proofs have
    something to do with it, and gaps, which it has none of, have not."""
    return replace(
        measured,
        gap=published.gap,
        gap_share=published.gap_share,
        gap_max=published.gap_max,
        gap_mean=published.gap_mean,
        gap_noise=None,
    )


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
    """The name of the first profile that was measured with what the pool and its validators are."""
    covering = (name for name, each in profiles.items() if not each.differences(spec, pool))
    return next(covering, None)
