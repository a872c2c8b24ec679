"""Signed documents: what is refused, and why."""

import json

import pytest

from runspec.core.canonical import canonical_json
from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, open_document, sign_document

KEY = SigningKey.generate()
MAX = 10_000


def open_it(data: bytes, **changes):
    arguments = {"kind": "lease", "keys": {KEY.public_hex}, "max_bytes": MAX} | changes
    return open_document(data, **arguments)


def test_a_signed_document_opens_to_its_payload():
    data = sign_document("lease", {"step": 3, "name": "é"}, KEY)
    assert open_it(data).payload == {"step": 3, "name": "é"}
    assert open_it(data).key == KEY.public_hex


def test_the_bytes_do_not_depend_on_the_order_of_keys():
    assert sign_document("k", {"a": 1, "b": 2}, KEY) == sign_document("k", {"b": 2, "a": 1}, KEY)


def test_a_document_of_one_kind_does_not_pass_for_another():
    data = sign_document("batch", {"step": 3}, KEY)
    with pytest.raises(BadSignature, match="lease expected"):
        open_it(data)
    renamed = canonical_json(json.loads(data) | {"kind": "lease"})
    with pytest.raises(BadSignature, match="signature does not match"):
        open_it(renamed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"payload": {"step": 4}}, "does not match"),
        ({"key": SigningKey.generate().public_hex}, "may not sign"),
        ({"algorithm": "none"}, "unknown algorithm"),
        ({"signature": "00" * 64}, "does not match"),
        ({"signature": "not hex"}, "does not match"),
        ({"signature": 7}, "wrong type"),
        ({"payload": []}, "wrong type"),
    ],
)
def test_a_changed_document_is_refused(change, message):
    envelope = json.loads(sign_document("lease", {"step": 3}, KEY)) | change
    with pytest.raises(BadSignature, match=message):
        open_it(canonical_json(envelope))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff",
        b'{"a":1,"a":2}',
        b'{"a":NaN}',
        b'{"a":1e999}',
        b'{"a":"\\ud800"}',
        b"[" * 5000,
        b"{" + b" " * MAX,
    ],
)
def test_malformed_bytes_are_refused(data):
    with pytest.raises(BadSignature, match="not a signed document"):
        open_it(data)


def test_any_key_is_accepted_only_when_asked_for():
    stranger = SigningKey.generate()
    data = sign_document("lease", {}, stranger)
    assert open_it(data, keys=None).key == stranger.public_hex
    with pytest.raises(BadSignature, match="may not sign"):
        open_it(data)


@pytest.mark.parametrize("respell", [str.upper, lambda s: f" {s}", lambda s: s + "00"])
def test_a_signature_has_one_spelling(respell):
    envelope = json.loads(sign_document("lease", {"step": 3}, KEY))
    with pytest.raises(BadSignature, match="does not match"):
        open_it(canonical_json(envelope | {"signature": respell(envelope["signature"])}))
