"""Lanes of signed documents: payloads with changes under a sound signature, and damaged bytes.

A payload is taken word for word or not at all. No bytes but those that were signed are the signer's
word.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from hypothesis import strategies as st

from broadcast import manifest
from runspec.core import roles
from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.signed import BadSignature, sign_document
from tests.fuzz.bounds import Lane
from tests.fuzz.strategies import changed, damaged_json
from tests.verify.coordinator.deployment import tiny_spec
from tests.verify.profiles import made_profile
from tests.verify.small_model import fixed_key
from verify import profile
from verify.formats import batch, documents, lease, submission, verdict
from verify.thresholds import BFLOAT16, ChunkLimits

KEY, GUEST = fixed_key(9), fixed_key(1)
"""Of every signer, and of whoever has an invite."""
KEYS = frozenset({KEY.public_hex})
DIGEST, OTHER = "ab" * 32, "cd" * 32
NOW, LATER = 1.8e9, 2.0**37
ODD = [
    *(DIGEST, DIGEST.upper(), OTHER[:-1], "demo", "../x", KEY.public_hex, 2**31 - 1, 2**44),
    *(manifest.MAX_CHUNK_BYTES, manifest.MAX_CHUNK_BYTES + 1, "a.safetensors", "manifest.json"),
]


def said(document: Any) -> dict[str, Any]:
    """The payload that a document was read from."""
    match document:
        case manifest.WeightsManifest():
            return json.loads(manifest.sign_manifest(document, KEY))["payload"]
        case profile.Profile():
            return document.model_dump(mode="json")
        case roles.Roles():
            held = {name: sorted(getattr(document, name)) for name in roles.ROLE_NAMES}
            times = {"issued": document.issued, "expires": document.expires}
            return {"run": document.run, "roles": held, **times}
        case _:
            return batch.without_empty_shares(asdict(document))


def as_read(document: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """Who holds a role is a set; a site's fields of later releases are passed over; what may be
    left out is as if it were empty."""
    match document:
        case roles.Roles():
            held = {name: sorted(set(keys)) for name, keys in payload["roles"].items()}
            return {**payload, "roles": held}
        case documents.Site():
            return {name: payload.get(name, []) for name in asdict(document)}
        case lease.Lease():
            return {"devices": "", **payload}
        case manifest.WeightsManifest() | profile.Profile():
            return payload
        case _:
            return batch.without_empty_shares(payload)


@dataclass(frozen=True)
class Kind:
    """A kind of document: sound payloads, and how it is opened."""

    name: str
    sound: list[Any]
    """Documents, or payloads of them."""
    open: Callable[[bytes], Any]
    memory: int = 4 << 20

    @cached_property
    def payloads(self) -> list[dict[str, Any]]:
        return [each if isinstance(each, dict) else said(each) for each in self.sound]

    def signed(self, payload: dict[str, Any]) -> bytes:
        return sign_document(self.name, payload, KEY)

    def check(self, document: Any, payload: dict[str, Any]) -> None:
        assert said(document) == as_read(document, payload)

    def refused(self, payload: dict[str, Any]) -> None:
        # compared as bytes: False == 0 and 3.0 == 3
        assert canonical_json(payload) not in map(canonical_json, self.payloads)


def _open_invite(data: bytes) -> roles.Invite:
    """With a sound proof, as whoever has the secret can make one for any document."""
    proof = sign_document(roles.PROOF_KIND, {"worker": OTHER}, GUEST).decode()
    used = {"document": data.decode("utf-8", "replace"), "proof": proof}
    return roles.open_invite(used, run="demo", worker=OTHER, coordinators=KEYS, now=NOW)


_SHARE = ("http://127.0.0.1:8000", DIGEST, OTHER, 400, 128.0, 0.5)
_GROUPS = [batch.BatchGroup(DIGEST, OTHER, group, 3, 2) for group in (0, 1)]
_SHARES = batch.divide(18, 24, ["a", "b"])
_CHUNKS = [{"blake3": DIGEST, "size": 20}, {"blake3": OTHER, "size": 10}]
_INFO = {"size": 30, "blake3": DIGEST, "chunks": _CHUNKS}
_ANCHOR = {
    "run": "demo",
    "version": 3,
    "base": None,
    "model_digest": DIGEST,
    "tensors": {"w": {"dtype": "bfloat16", "shape": [2, 3], "blake3": DIGEST}},
    "files": ["a.safetensors"],
    "objects": {"a.safetensors": _INFO, "config.json": _INFO},
    "delta": {},
}
_BOTH = _ANCHOR | {"base": 2, "delta": {"a.safetensors.delta": _INFO}}
_DELTA = _BOTH | {"objects": {"config.json": _INFO}}
_HELD = {name: sorted({KEY.public_hex, OTHER}) for name in roles.ROLE_NAMES}
_SHORT = (ChunkLimits(128, 0.2, 0.1, math.inf, 4.0), ChunkLimits(256, 0.1, 0.1, 9.0, 4.0))
_PROFILE = made_profile(replace(BFLOAT16, short=_SHORT), sampler={"precision": "bfloat16"})
_KINDS = [
    Kind(
        submission.KIND,
        [submission.SubmissionEnvelope("demo", 3, KEY.public_hex, 0, DIGEST, OTHER, 4096)],
        submission.open_submission,
    ),
    Kind(
        verdict.KIND,
        [verdict.VerdictEnvelope("demo", 3, DIGEST, True, "", [1], "p: E", OTHER, 4096)],
        lambda data: verdict.open_verdict(data, validators=KEYS),
    ),
    Kind(
        lease.KIND,
        [lease.Lease("demo", 3, OTHER, DIGEST, "near", 0, 2, 1, DIGEST, 1.5, 61.5)],
        lambda data: lease.open_lease(data, coordinators=KEYS),
    ),
    Kind(
        batch.KIND,
        [batch.BatchManifest("demo", 3, _GROUPS, True, {"by": {"8": 2}}, 7, DIGEST)],
        lambda data: batch.open_batch(data, coordinators=KEYS, run="demo", step=3),
    ),
    Kind(
        batch.RANGES_KIND,
        [batch.RangeManifest("demo", 3, batch.RowRange(18, 24), 7, DIGEST, _SHARES)],
        lambda d: batch.open_ranges(d, coordinators=KEYS, run="demo", step=3, rows_per_step=6),
    ),
    Kind(
        batch.OFFER_KIND,
        [batch.ShareOffered("a", *_SHARE, "demo", 3, DIGEST, OTHER)],
        lambda data: batch.open_offer(data, keys={"a": KEY.public_hex}, run="demo"),
    ),
    Kind(
        batch.COMMIT_KIND,
        [
            batch.CommitRecord(
                *("demo", 3, DIGEST, "float16", [batch.Contribution(n, *_SHARE) for n in "ab"]),
                *([batch.Dropped("c", "no share offered")], OTHER, 7, DIGEST),
            )
        ],
        lambda data: batch.open_commit(data, coordinators=KEYS, run="demo", step=3),
    ),
    Kind(
        documents.SITE_KIND,
        [documents.Site("demo", ["http://a"], [documents.SiteFile("s", "a/b", 7, DIGEST)], OTHER)],
        lambda data: documents.open_site(data, coordinators=KEYS, run="demo"),
    ),
    Kind(
        roles.LATEST,
        [roles.Latest("demo", 3, DIGEST, 1.5, LATER)],
        lambda data: roles.open_latest(data, run="demo", publishers=KEYS),
    ),
    Kind(
        roles.KIND,
        [{"run": "demo", "issued": 1.5, "expires": LATER, "roles": _HELD}],
        lambda data: roles.open_roles(data, root_public_key=KEY.public_hex, run="demo", now=NOW),
    ),
    Kind(
        roles.INVITE_KIND,
        [{"run": "demo", "key": GUEST.public_hex, "pool": "near", "uses": 3, "expires": LATER}],
        _open_invite,
    ),
    Kind(
        manifest.KIND,
        [_ANCHOR, _BOTH, _DELTA],
        lambda data: manifest.open_manifest(data, run="demo", publishers=KEYS),
        manifest.MAX_MEMORY,
    ),
    Kind(
        profile.KIND,
        [_PROFILE],
        lambda data: profile.open_profile(data, root_public_key=KEY.public_hex),
    ),
]
KINDS = {kind.name: kind for kind in _KINDS}
SIGNED = [(kind.name, kind.signed(kind.payloads[0])) for kind in _KINDS]
_ORIGINALS = [data for _, data in SIGNED]


def _check_damaged(document: Any, given: tuple[str, bytes]) -> None:
    assert said(document) == KINDS[given[0]].payloads[0]


def _open_spec(payload: dict[str, Any]) -> Any:
    data = sign_document(documents.SPEC_KIND, payload, KEY)
    return documents.open_spec(data, coordinators=KEYS, place="http://x")


LANES = [
    *(
        Lane(
            kind.name,
            changed(kind.payloads, ODD),
            lambda payload, kind=kind: kind.open(kind.signed(payload)),
            kind.check,
            (BadSignature,),
            kind.refused,
            memory=kind.memory,
        )
        for kind in _KINDS
    ),
    Lane(
        "envelope",
        st.sampled_from(SIGNED)
        | st.tuples(st.sampled_from(list(KINDS)), damaged_json(_ORIGINALS))
        | st.sampled_from(SIGNED).flatmap(
            lambda one: st.tuples(st.just(one[0]), damaged_json([one[1]]))
        ),
        lambda given: KINDS[given[0]].open(given[1]),
        _check_damaged,
        (BadSignature,),
        memory=manifest.MAX_MEMORY,
    ),
    Lane(
        "spec",
        changed([json.loads(documents.sign_spec(tiny_spec(), KEY))["payload"]], ODD),
        _open_spec,
        refusals=(BadSignature, UserError),
        memory=64 << 20,
        longest=1 << 20,
    ),
]
