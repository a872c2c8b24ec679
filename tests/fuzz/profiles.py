"""Lane: profiles of calibrated limits. `BadSignature`, or limits that a check can use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from runspec.core.canonical import canonical_json
from runspec.core.signed import BadSignature, sign_document
from tests.fuzz.bounds import bounded
from tests.fuzz.mutate import Changer
from tests.verify.profiles import ROOT, made_profile
from verify.profile import (
    KIND,
    Profile,
    looser_than_published,
    open_profile,
)
from verify.thresholds import BFLOAT16, ChunkLimits, limits_for

SHORT = (ChunkLimits(128, 0.2, 0.1, math.inf, 4.0), ChunkLimits(256, 0.1, 0.1, 9.0, 4.0))
PROFILE = made_profile(replace(BFLOAT16, short=SHORT), sampler={"precision": "bfloat16"})
PAYLOAD = PROFILE.model_dump(mode="json")
MEMORY = 4 << 20

ODD = ["bfloat16", "exponential-tail/2", "../x", 2**53 + 1, 1e-300, -0.0, 10**400]


def opened(data: bytes) -> Profile | None:
    with bounded(MEMORY):
        try:
            return open_profile(data, root_public_key=ROOT.public_hex)
        except BadSignature as error:
            assert len(str(error)) < 10_000
            return None


def check_limits(profile: Profile) -> None:
    limits = profile.as_limits()
    for elements in (1, 127, 128, 255, 256, 10**6):
        here = limits.for_chunk(elements)
        assert 0.0 <= here.mismatch_share <= 1.0 and 0.0 <= here.miss_share <= 1.0
        assert here.mantissa_mean >= 0.0 and 0.0 <= here.mantissa_median < math.inf
    published = limits_for(profile.sampler.precision, profile.validator.precision)
    assert set(looser_than_published(limits, published)) <= set(profile.looser)


def check_payload(made: dict[str, Any]) -> bool:
    """A signed payload is limits that a check can use, or not believed."""
    profile = opened(sign_document(KIND, made, ROOT))
    if profile is None:
        assert canonical_json(made) != canonical_json(PAYLOAD)
        return False
    check_limits(profile)
    return True


def profile() -> Callable[[Random], bool]:
    """Signed payloads with changes."""
    draw = Changer([PAYLOAD], ODD)
    return lambda rng: check_payload(draw(rng))
