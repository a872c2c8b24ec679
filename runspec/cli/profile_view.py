"""Calibration profiles for people: who was measured, until when, how strict; not their tables."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from runspec.core.hashing import digest_bytes
from runspec.core.signed import BadSignature


def with_identities(tree: dict[str, Any]) -> dict[str, Any]:
    """A resolved spec as JSON, with what identifies each profile in the place of its document."""
    profiles = tree["verify"]["profiles"]
    if not any(profile["document"] for profile in profiles):
        return tree
    shown = [
        profile | {"document": profile_identity(profile["document"])}
        if profile["document"]
        else profile
        for profile in profiles
    ]
    return tree | {"verify": tree["verify"] | {"profiles": shown}}


def profile_identity(document: str) -> dict[str, str | float]:
    """What tells a profile from others, believed or not: whoever judges by it checks it.

    Args:
        document: signed, or what was taken for it.

    Returns:
        digest (BLAKE3 of the document) and, where it is a profile, pool, validators, issued,
        expires (days, UTC), rate of false rejections a rollout; else unreadable, which says why.
    """
    from verify.calibration.profile import open_profile

    data = document.encode("utf-8", "replace")
    digest = digest_bytes(data)
    try:
        profile = open_profile(data, root_public_key=None, dated=False)
    except BadSignature as error:
        return {"digest": digest, "unreadable": str(error)}
    sampler, validator = profile.sampler, profile.validator
    return {
        "digest": digest,
        "pool": f"{sampler.engine}, {sampler.precision}, {sampler.hardware}",
        "validators": f"{validator.engine}, {validator.precision}, {validator.hardware}",
        "issued": _day(profile.issued),
        "expires": _day(profile.expires),
        "rate": profile.rate,
    }


def _day(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).date().isoformat()
