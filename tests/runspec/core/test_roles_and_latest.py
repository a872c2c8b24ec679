"""roles.json and latest.json: pinned root, right run, right time."""

import time
from dataclasses import asdict

import pytest

from runspec.core.keys import SigningKey
from runspec.core.latest import Latest, open_latest, sign_latest
from runspec.core.roles import open_roles, sign_roles
from runspec.core.signed import BadSignature, sign_document

ROOT, PUBLISHER = SigningKey.generate(), SigningKey.generate()
HELD = {"publisher": [PUBLISHER.public_hex], "coordinator": [], "validator": []}
DAY = 86400.0
DIGEST = "ab" * 32
HUGE = 10**400
"""JSON holds it, no float does."""


def test_roles_open_under_the_pinned_root():
    data = sign_roles("run", HELD, ROOT, valid_s=DAY)
    roles = open_roles(data, root_public_key=ROOT.public_hex, run="run")
    assert roles.publisher == {PUBLISHER.public_hex}
    assert roles.validator == frozenset()


@pytest.mark.parametrize(
    ("data", "run", "message"),
    [
        (sign_roles("run", HELD, SigningKey.generate(), valid_s=DAY), "run", "may not sign"),
        (sign_roles("run", HELD, ROOT, valid_s=DAY), "other", "not for run"),
        (sign_roles("run", HELD, ROOT, valid_s=60, now=1000.0), "run", "expired"),
        (sign_roles("run", HELD, ROOT, valid_s=60, now=time.time() + DAY), "run", "future"),
        (sign_document("roles", {"run": "run"}, ROOT), "run", "not for run"),
        (
            sign_document("roles", {"run": "run", "issued": 0, "expires": 1e12, "roles": {}}, ROOT),
            "run",
            "exactly",
        ),
        (
            sign_document("roles", {"run": "run", "issued": 0, "expires": HUGE, "roles": {}}, ROOT),
            "run",
            "numbers",
        ),
    ],
)
def test_roles_that_must_not_be_believed(data, run, message):
    with pytest.raises(BadSignature, match=message):
        open_roles(data, root_public_key=ROOT.public_hex, run=run)


def test_clock_skew_of_minutes_is_allowed():
    soon = sign_roles("run", HELD, ROOT, valid_s=60, now=time.time() + 240)
    assert open_roles(soon, root_public_key=ROOT.public_hex, run="run").run == "run"


def test_latest_opens_for_its_publisher():
    data = sign_latest("run", 7, DIGEST, PUBLISHER)
    latest = open_latest(data, run="run", publishers={PUBLISHER.public_hex})
    assert (latest.version, latest.manifest_digest) == (7, DIGEST)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": "other"}, "of run"),
        ({"version": -1}, "malformed"),
        ({"version": True}, "malformed"),
        ({"manifest_digest": "../../etc"}, "malformed"),
        ({"expires": "soon"}, "numbers"),
        ({"expires": HUGE}, "numbers"),
        ({"issued": True}, "numbers"),
        ({"issued": 0.0, "expires": 1.0}, "expired"),
        ({"issued": time.time() + DAY, "expires": time.time() + 2 * DAY}, "future"),
        ({"more": 1}, "unexpected"),
    ],
)
def test_latest_that_must_not_be_believed(change, message):
    now = time.time()
    payload = asdict(Latest("run", 7, DIGEST, now, now + 60)) | change
    with pytest.raises(BadSignature, match=message):
        open_latest(
            sign_document("latest", payload, PUBLISHER),
            run="run",
            publishers={PUBLISHER.public_hex},
        )
