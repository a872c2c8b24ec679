"""Lanes: documents that somebody has signed, whatever he put into them, and damaged ones."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from tests.fuzz import test_manifest, test_profiles
from tests.fuzz.documents import KINDS, ODD
from tests.fuzz.fast.mutate import Changer, damaged_json

Case = Callable[[Random], bool]


def _payloads(name: str) -> Callable[[], Case]:
    def make() -> Case:
        kind = next(kind for kind in KINDS if kind.name == name)
        draw = Changer([kind.payload], ODD)
        return lambda rng: kind.check(draw(rng))

    return make


submission, verdict, lease = map(_payloads, ("submission", "verdict", "lease"))
batch, site, latest, roles, invite = map(_payloads, ("batch", "site", "latest", "roles", "invite"))


def manifest() -> Case:
    """What a version is; half of the cases are damaged bytes."""
    draw = Changer(test_manifest.VALID, test_manifest.LEAVES)
    signed = test_manifest.SIGNED

    def case(rng: Random) -> bool:
        if rng.random() < 0.5:
            return test_manifest.check_payload(draw(rng))
        original = rng.choice(signed)
        return test_manifest.check_damaged(damaged_json(rng, original, signed), original)

    return case


def profile() -> Case:
    """Calibrated limits."""
    draw = Changer([test_profiles.PAYLOAD], test_profiles.ODD)
    return lambda rng: test_profiles.check_payload(draw(rng))


def envelope() -> Case:
    """Bytes of every kind with damage, and with real signatures."""
    kinds = [(kind, kind.signed(kind.payload)) for kind in KINDS]
    originals = [data for _, data in kinds]

    def case(rng: Random) -> bool:
        kind, data = rng.choice(kinds)
        if rng.random() < 0.05:  # a sound document, of this kind or of another
            return kind.check_damaged(rng.choice(originals))
        return kind.check_damaged(damaged_json(rng, data, originals))

    return case
