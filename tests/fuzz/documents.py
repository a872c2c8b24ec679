"""Lanes: signed documents. Their payloads hold anything, or their bytes are damaged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from random import Random
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from runspec.core import invite, latest, roles
from runspec.core.address import is_server_url
from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.hashing import is_digest
from runspec.core.keys import SigningKey
from runspec.core.signed import CLOCK_SKEW_S, BadSignature, sign_document
from tests.fuzz.bounds import bounded
from tests.fuzz.mutate import Changer, damaged_json
from tests.verify.coordinator.deployment import tiny_spec
from verify.formats import batch, islands, joining, lease, ranges, submission, verdict
from verify.formats.batch import BatchManifest
from verify.formats.islands import CommitRecord, ShareOffered, without_empty_shares
from verify.formats.joining import SPEC_KIND, Site, is_inside, open_spec, sign_spec
from verify.formats.lease import Lease
from verify.formats.ranges import RangeManifest
from verify.formats.submission import SubmissionEnvelope, open_submission
from verify.formats.verdict import VerdictEnvelope

KEY = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(32)))
GUEST = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32))
"""Of an invite."""
KEYS = frozenset({KEY.public_hex})
DIGEST, OTHER = "ab" * 32, "cd" * 32
NOW, LATER = 1.8e9, 2.0**37
MEMORY = 4 << 20
_SPEC_MEMORY = 64 << 20
ODD = [DIGEST, DIGEST.upper(), OTHER[:-1], "demo", "../x", KEY.public_hex, 2**31 - 1]


@dataclass(frozen=True)
class Kind:
    """One kind: a sound payload, and how it is opened."""

    name: str
    payload: dict[str, Any]
    open: Callable[[bytes], Any]

    @cached_property
    def sound(self) -> bytes:
        return canonical_json(self.payload)

    def signed(self, payload: dict[str, Any]) -> bytes:
        return sign_document(self.name, payload, KEY)

    def opened(self, data: bytes) -> Any:
        """What the bytes say, or None where they are not believed."""
        with bounded(MEMORY):
            try:
                return self.open(data)
            except BadSignature as error:
                assert len(str(error)) < 10_000
                return None

    def check(self, made: dict[str, Any]) -> bool:
        """A signed payload is taken word for word, within its bounds, or not at all."""
        document = self.opened(self.signed(made))
        if document is None:
            assert canonical_json(made) != self.sound  # as bytes: False == 0, 3.0 == 3
            return False
        check_fields(document)
        assert said(document) == _as_read(document, made)
        return True

    def check_damaged(self, data: bytes) -> bool:
        """No bytes are the signer's word on something else."""
        document = self.opened(data)
        assert document is None or said(document) == self.payload
        return document is not None


def said(document: Any) -> dict[str, Any]:
    """The payload that a document was read from."""
    if isinstance(document, roles.Roles):
        held = {name: sorted(getattr(document, name)) for name in roles.ROLE_NAMES}
        times = {"issued": document.issued, "expires": document.expires}
        return {"run": document.run, "roles": held, **times}
    return without_empty_shares(asdict(document))


def _as_read(document: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """Who holds a role is a set; of a site fields of later releases are passed over."""
    if isinstance(document, roles.Roles):
        held = {name: sorted(set(keys)) for name, keys in payload["roles"].items()}
        return {**payload, "roles": held}
    if isinstance(document, Site):
        return {name: payload[name] for name in asdict(document)}
    return without_empty_shares(payload)


def natural(number: object) -> bool:
    return type(number) is int and 0 <= number < 2**31


def check_share(share: ShareOffered | islands.Contribution) -> None:
    assert is_digest(share.manifest) and is_digest(share.share)
    assert is_server_url(share.url) and share.bytes > 0
    assert all(0.0 <= float(number) < 2**53 for number in (share.weight, share.norm))


def check_of_islands(document: ShareOffered | CommitRecord) -> None:
    assert document.run == "demo" and natural(document.step) and is_digest(document.base)
    if isinstance(document, ShareOffered):
        assert not document.data or is_digest(document.data)
        check_share(document)
        return
    assert document.step == 3 and document.ledger_rows > 0 and is_digest(document.ledger_chain)
    assert document.previous is None or is_digest(document.previous)
    assert all(isinstance(drop.reason, str) for drop in document.dropped)
    assert sum(each.weight for each in document.contributors) > 0.0
    for each in document.contributors:
        check_share(each)


def check_fields(document: object) -> None:
    """Whoever has one may use its fields as their types say."""
    match document:
        case SubmissionEnvelope():
            assert isinstance(document.run, str) and document.worker == KEY.public_hex
            assert is_digest(document.digest) and is_digest(document.lease)
            assert all(map(natural, (document.step, document.index, document.bytes)))
        case VerdictEnvelope():
            assert isinstance(document.run, str) and isinstance(document.reason, str)
            assert is_digest(document.submission) and is_digest(document.digest)
            assert isinstance(document.accepted, bool)
            assert document.fault.isprintable() and len(document.fault) <= 400
            assert all(map(natural, (document.step, document.bytes, *document.dropped_groups)))
        case Lease():
            assert isinstance(document.run, str) and isinstance(document.pool, str)
            assert len(document.seed) == 32
            assert all(0 <= time < 2**53 for time in (document.issued, document.expires))
            numbers = (document.step, document.index, document.groups, document.version)
            assert all(map(natural, numbers))
        case BatchManifest():
            assert document.run == "demo" and document.step == 3
            assert type(document.complete) is bool and isinstance(document.stats, dict)
            for group in document.groups:
                assert is_digest(group.submission) and is_digest(group.verdict)
                assert all(map(natural, (group.group, group.step, group.version)))
        case RangeManifest():
            assert (document.run, document.step, document.rows.first) == ("demo", 3, 18)
            assert document.rows.last == 24 and document.ledger_rows > 0
            assert sum(share.last - share.first for share in document.shares) in (0, 6)
        case ShareOffered() | CommitRecord():
            check_of_islands(document)
        case Site():
            assert all(isinstance(url, str) and len(url) <= 400 for url in document.weights)
            for file in document.files:
                assert is_inside(file.path) and is_digest(file.digest) and file.bytes >= 0
        case latest.Latest():
            assert document.run == "demo" and type(document.version) is int
            assert is_digest(document.manifest_digest)
            assert float(document.issued) <= float(document.expires) + 2 * CLOCK_SKEW_S
        case roles.Roles():
            held = document.publisher | document.coordinator | document.validator
            assert document.run == "demo" and all(map(is_digest, held))
        case invite.Invite():
            assert document.run == "demo" and is_digest(document.key)
            assert 0 < document.uses <= invite.MAX_USES and document.expires >= NOW
        case _:
            raise AssertionError(document)


def _open_invite(data: bytes) -> invite.Invite:
    """With a proof that is sound, as whoever has the secret can make one for any document."""
    proof = sign_document(invite.PROOF_KIND, {"worker": OTHER}, GUEST).decode()
    used = {"document": data.decode("utf-8", "replace"), "proof": proof}
    return invite.open_invite(used, run="demo", worker=OTHER, coordinators=KEYS, now=NOW)


_SHARE = {
    "island": "a",
    "url": "http://127.0.0.1:8000",
    "manifest": DIGEST,
    "share": OTHER,
    "bytes": 400,
    "weight": 128.0,
    "norm": 0.5,
}
_GROUP = {"submission": DIGEST, "verdict": OTHER, "group": 0, "step": 3, "version": 2}
KINDS = [
    Kind(
        submission.KIND,
        asdict(SubmissionEnvelope("demo", 3, KEY.public_hex, 0, DIGEST, OTHER, 4096)),
        open_submission,
    ),
    Kind(
        verdict.KIND,
        asdict(VerdictEnvelope("demo", 3, DIGEST, True, "", [1], "p: E: x", OTHER, 4096)),
        lambda data: verdict.open_verdict(data, validators=KEYS),
    ),
    Kind(
        lease.KIND,
        asdict(Lease("demo", 3, OTHER, KEY.public_hex, "near", 0, 2, 1, DIGEST, 1.5, 61.5)),
        lambda data: lease.open_lease(data, coordinators=KEYS),
    ),
    Kind(
        batch.KIND,
        {
            "run": "demo",
            "step": 3,
            "groups": [_GROUP, {**_GROUP, "group": 1}],
            "complete": True,
            "stats": {"opened": 1.5, "by_target": {"8": {"rollouts": 2}}},
            "ledger_rows": 7,
            "ledger_chain": DIGEST,
        },
        lambda data: batch.open_batch(data, coordinators=KEYS, run="demo", step=3),
    ),
    Kind(
        ranges.KIND,
        {
            "run": "demo",
            "step": 3,
            "rows": {"first": 18, "last": 24},
            "ledger_rows": 7,
            "ledger_chain": DIGEST,
            "shares": [
                {"island": "a", "first": 18, "last": 21},
                {"island": "b", "first": 21, "last": 24},
            ],
        },
        lambda data: ranges.open_ranges(
            data, coordinators=KEYS, run="demo", step=3, rows_per_step=6
        ),
    ),
    Kind(
        islands.OFFER_KIND,
        {"run": "demo", "step": 3, "base": DIGEST, "data": OTHER, **_SHARE},
        lambda data: islands.open_offer(data, keys={"a": KEY.public_hex}, run="demo"),
    ),
    Kind(
        islands.COMMIT_KIND,
        {
            "run": "demo",
            "step": 3,
            "base": DIGEST,
            "codec": "float16",
            "contributors": [_SHARE, {**_SHARE, "island": "b"}],
            "dropped": [{"island": "c", "reason": "no share offered"}],
            "previous": OTHER,
            "ledger_rows": 7,
            "ledger_chain": DIGEST,
        },
        lambda data: islands.open_commit(data, coordinators=KEYS, run="demo", step=3),
    ),
    Kind(
        joining.SITE_KIND,
        {
            "run": "demo",
            "weights": ["http://127.0.0.1:8000", "https://relay.example.org"],
            "files": [{"source": "sums", "path": "a/b.parquet", "bytes": 7, "digest": DIGEST}],
            "data": OTHER,
        },
        lambda data: joining.open_site(data, coordinators=KEYS, run="demo"),
    ),
    Kind(
        latest.KIND,
        {
            "run": "demo",
            "version": 3,
            "manifest_digest": DIGEST,
            "issued": 1.5,
            "expires": LATER,
        },
        lambda data: latest.open_latest(data, run="demo", publishers=KEYS),
    ),
    Kind(
        roles.KIND,
        {
            "run": "demo",
            "issued": 1.5,
            "expires": LATER,
            "roles": {name: sorted({KEY.public_hex, OTHER}) for name in roles.ROLE_NAMES},
        },
        lambda data: roles.open_roles(data, root_public_key=KEY.public_hex, run="demo", now=NOW),
    ),
    Kind(
        invite.KIND,
        {"run": "demo", "key": GUEST.public_hex, "pool": "near", "uses": 3, "expires": LATER},
        _open_invite,
    ),
]


# --- lanes --------------------------------------------------------------------------------------

Case = Callable[[Random], bool]


def payloads(name: str) -> Case:
    """Signed payloads of one kind with changes."""
    kind = next(kind for kind in KINDS if kind.name == name)
    draw = Changer([kind.payload], ODD)
    return lambda rng: kind.check(draw(rng))


def spec() -> Case:
    """The signed, resolved spec that volunteers receive."""
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
    """Damaged bytes of every kind, with real signatures."""
    kinds = [(kind, kind.signed(kind.payload)) for kind in KINDS]
    originals = [data for _, data in kinds]

    def case(rng: Random) -> bool:
        kind, data = rng.choice(kinds)
        if rng.random() < 0.05:  # a sound document, of this kind or of another
            return kind.check_damaged(rng.choice(originals))
        if rng.random() < 0.05:
            return kind.check_damaged(rng.randbytes(rng.randrange(300)))
        return kind.check_damaged(damaged_json(rng, data, originals))

    return case
