"""Lanes: documents that somebody has signed, whatever he put into them, and damaged ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from runspec.core.errors import UserError
from runspec.core.signed import BadSignature, sign_document
from tests.fuzz import test_manifest, test_profiles
from tests.fuzz.bounds import bounded
from tests.fuzz.documents import KEY, KEYS, KINDS, ODD
from tests.fuzz.fast.mutate import Changer, damaged_json
from tests.verify.coordinator.deployment import tiny_spec
from verify.formats.spec import KIND as SPEC_KIND
from verify.formats.spec import open_spec, sign_spec

Case = Callable[[Random], bool]
_SPEC_MEMORY = 64 << 20


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


def spec() -> Case:
    """The resolved spec that volunteers are handed."""
    sound = json.loads(sign_spec(tiny_spec(), KEY))["payload"]
    draw = Changer([sound], ODD)

    def case(rng: Random) -> bool:
        data = sign_document(SPEC_KIND, draw(rng), KEY)
        with bounded(_SPEC_MEMORY):
            try:
                open_spec(data, coordinators=KEYS, place="http://x")
            except (BadSignature, UserError) as error:
                assert len(str(error)) < 1 << 20
                return False
        return True

    return case


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
