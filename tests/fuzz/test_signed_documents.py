"""Whatever is in the envelope of a submission or a verdict, or in a lease: `BadSignature`, or
fields of the types that the rest of the program takes them for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from runspec.common.canonical import canonical_json
from runspec.common.hashing import is_digest
from runspec.common.keys import SigningKey
from runspec.common.signed import BadSignature, sign_document
from tests.fuzz.bounds import bounded, costly
from tests.fuzz.json_values import changed, damaged, values
from verify.formats import lease, submission, verdict
from verify.formats.lease import Lease, open_lease
from verify.formats.submission import SubmissionEnvelope, open_submission
from verify.formats.verdict import VerdictEnvelope, open_verdict

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

KEY = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(32)))
KEYS = frozenset({KEY.public_hex})
DIGEST, OTHER = "ab" * 32, "cd" * 32
SUBMISSION = asdict(SubmissionEnvelope("demo", 3, KEY.public_hex, 0, DIGEST, OTHER, 4096))
VERDICT = asdict(VerdictEnvelope("demo", 3, DIGEST, True, "", [1], OTHER, 4096))
LEASE = asdict(Lease("demo", 3, OTHER, KEY.public_hex, "near", 0, 2, 1, DIGEST, 1.5, 61.5))
KINDS = [
    (submission.KIND, SUBMISSION, open_submission),
    (verdict.KIND, VERDICT, lambda data: open_verdict(data, validators=KEYS)),
    (lease.KIND, LEASE, lambda data: open_lease(data, coordinators=KEYS)),
]
SIGNED = [sign_document(kind, payload, KEY) for kind, payload, _ in KINDS]
MEMORY = 4 << 20
Open = Callable[[bytes], Any]

anything = values([DIGEST, DIGEST.upper(), OTHER[:-1], "demo", "../x", KEY.public_hex, 2**31 - 1])


def natural(number: object) -> bool:
    return type(number) is int and 0 <= number < 2**31


def check_fields(document: object) -> None:
    match document:
        case SubmissionEnvelope():
            assert isinstance(document.run, str) and document.worker == KEY.public_hex
            assert is_digest(document.digest) and is_digest(document.lease)
            assert all(map(natural, (document.step, document.index, document.bytes)))
        case VerdictEnvelope():
            assert isinstance(document.run, str) and isinstance(document.reason, str)
            assert is_digest(document.submission) and is_digest(document.digest)
            assert isinstance(document.accepted, bool)
            assert all(map(natural, (document.step, document.bytes, *document.dropped_groups)))
        case Lease():
            assert isinstance(document.run, str) and isinstance(document.pool, str)
            assert len(document.seed) == 32
            assert all(0 <= time < 2**53 for time in (document.issued, document.expires))
            numbers = (document.step, document.index, document.groups, document.version)
            assert all(map(natural, numbers))
        case _:
            raise AssertionError(document)


def opened(open_it: Open, data: bytes) -> object | None:
    with bounded(MEMORY):
        try:
            return open_it(data)
        except BadSignature as error:
            assert len(str(error)) < 10_000
            return None


@costly
@pytest.mark.parametrize(("kind", "payload", "open_it"), KINDS, ids=[kind for kind, *_ in KINDS])
@given(data=st.data())
def test_signed_payloads(
    kind: str, payload: dict[str, Any], open_it: Open, data: st.DataObject
) -> None:
    made = data.draw(changed([payload], anything))
    document = opened(open_it, sign_document(kind, made, KEY))
    if document is None:
        assert canonical_json(made) != canonical_json(payload)  # False == 0, 3.0 == 3
        return
    check_fields(document)
    assert asdict(document) == made  # type: ignore[call-overload]


@costly
@given(case=damaged(SIGNED))
def test_damaged_bytes(case: tuple[bytes, bytes]) -> None:
    data, original = case
    for _, payload, open_it in KINDS:
        document = opened(open_it, data)
        if document is not None:
            assert asdict(document) == payload  # type: ignore[call-overload]
            assert opened(open_it, original) == document


@costly
@given(data=st.binary(max_size=300))
def test_documents_of_any_bytes(data: bytes) -> None:
    for *_, open_it in KINDS:
        assert opened(open_it, data) is None
