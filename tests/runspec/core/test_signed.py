"""Canonical JSON, signed documents, roles.json, latest.json and keys: what is refused, and why."""

import json
import stat
import time
from dataclasses import asdict

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from runspec.core.canonical import (
    MAX_DEPTH,
    MalformedJson,
    canonical_json,
    hash_parts,
    parse_object,
)
from runspec.core.roles import (
    Latest,
    Roles,
    make_invite,
    open_invite,
    open_latest,
    open_roles,
    sign_latest,
    sign_roles,
    use_invite,
)
from runspec.core.signed import (
    BadSignature,
    SignedDocument,
    SigningKey,
    is_public_key,
    open_document,
    sign_document,
    signature_is_valid,
)
from tests.weak_keys import PRIME, WEAK_KEYS, WeakKey

KEY, STRANGER, ROOT = SigningKey.generate(), SigningKey.generate(), SigningKey.generate()
HELD = {"publisher": [KEY.public_hex], "coordinator": [], "validator": []}
UNNAMED = {"run": "run", "issued": 0, "expires": 1e12, "roles": {}}
DIGEST = "ab" * 32
DAY = 86400.0
HUGE = 10**400
"""JSON holds it, no float does."""
MAX = 10_000
weak = pytest.mark.parametrize("public_hex", WEAK_KEYS)


def test_an_object_has_one_form_and_reads_back():
    value = {"b": [1, 2.5, None], "a": {"é": "\\", "d": True}}
    data = canonical_json(value)
    assert data == '{"a":{"d":true,"é":"\\\\"},"b":[1,2.5,null]}'.encode()
    assert parse_object(data, max_bytes=len(data)) == value
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            canonical_json({"a": number})


def test_nesting_is_counted_and_not_brackets():
    deepest = b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert parse_object(deepest, max_bytes=MAX)
    assert parse_object(b'{"a":[' + b"[]," * 50 + b"[]]}", max_bytes=MAX)
    beside = b'{"a":[' + b"[]," * 50 + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"]}"
    for deeper in (deepest.replace(b"[]", b"[[]]"), beside):
        with pytest.raises(MalformedJson, match="deeper than 32"):
            parse_object(deeper, max_bytes=MAX)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "Expecting value"),
        (b"{", "Expecting property name"),
        (b"[]", "object was expected, not list"),
        (b"\xff", "can't decode"),
        (b'{"a":1,"a":2}', "the same key twice"),
        (b'{"a":NaN}', "NaN is not allowed"),
        (b'{"a":1e999}', "no canonical form"),
        (b'{"a":"\\ud800"}', "no canonical form"),
        (b"[" * 5000, "nested deeper"),
        (b"{" + b" " * MAX, f"more than the {MAX} allowed"),
    ],
)
def test_malformed_bytes_are_refused(data, message):
    with pytest.raises(MalformedJson, match=message):
        parse_object(data, max_bytes=MAX)
    with pytest.raises(BadSignature, match=f"not a signed document: .*{message}"):
        opened(data)


def opened(data: bytes, *, keys: set[str] | None = frozenset({KEY.public_hex})) -> SignedDocument:
    return open_document(data, kind="lease", keys=keys, max_bytes=MAX)


def test_a_signed_document_opens_to_its_payload():
    data = sign_document("lease", {"step": 3, "name": "é"}, KEY)
    assert opened(data) == SignedDocument("lease", {"step": 3, "name": "é"}, KEY.public_hex)
    assert data == sign_document("lease", {"name": "é", "step": 3}, KEY)
    # and any key's only where that is asked for
    strange = sign_document("lease", {}, STRANGER)
    assert opened(strange, keys=None).key == STRANGER.public_hex
    with pytest.raises(BadSignature, match="may not sign"):
        opened(strange)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"payload": {"step": 4}}, "does not match"),
        ({"payload": []}, "wrong type"),
        ({"key": STRANGER.public_hex}, "may not sign"),
        ({"key": 7}, "wrong type"),
        ({"kind": "batch"}, "lease expected, got kind 'batch'"),
        ({"algorithm": "none"}, "unknown algorithm 'none'"),
        ({"signature": "00" * 64}, "does not match"),
        ({"signature": "not hex"}, "does not match"),
        ({"signature": str.upper}, "does not match"),
        ({"signature": " {}".format}, "does not match"),
        ({"signature": "{}00".format}, "does not match"),
        ({"signature": 7}, "wrong type"),
        ({"more": 1}, "instead of"),
    ],
)
def test_a_changed_document_is_refused(change, message):
    envelope = json.loads(sign_document("lease", {"step": 3}, KEY))
    for name, new in change.items():
        envelope[name] = new(envelope[name]) if callable(new) else new
    with pytest.raises(BadSignature, match=message):
        opened(canonical_json(envelope))


def test_a_document_of_one_kind_does_not_pass_for_another():
    other = json.loads(sign_document("batch", {"step": 3}, KEY))
    with pytest.raises(BadSignature, match="signature does not match"):
        opened(canonical_json(other | {"kind": "lease"}))


def roles(now: float | None = None, *, run: str = "run", root: SigningKey = ROOT) -> bytes:
    return sign_roles(run, HELD, root, valid_s=60.0, now=now)


def open_it(data: bytes, now: float | None = None) -> Roles:
    return open_roles(data, root_public_key=ROOT.public_hex, run="run", now=now)


def test_roles_open_under_the_pinned_root_and_minutes_of_clock_skew():
    held = open_it(roles())
    assert (held.run, held.publisher, held.keys) == ("run", {KEY.public_hex}, {KEY.public_hex})
    assert held.validator == frozenset()
    for now in (700.0, 1000.0, 1360.0):
        held = open_it(roles(1000.0), now)
        assert (held.issued, held.expires) == (1000.0, 1060.0)
    for now, message in ((699.0, "issued 301 s in the future"), (1361.0, "expired 301 s ago")):
        with pytest.raises(BadSignature, match=message):
            open_it(roles(1000.0), now)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (roles(root=STRANGER), "may not sign"),
        (roles(run="other"), "not for run"),
        (roles(1000.0), "expired"),
        (roles(time.time() + DAY), "future"),
        (sign_document("roles", {"run": "run"}, ROOT), "issued: Field required"),
        (sign_document("roles", UNNAMED, ROOT), "exactly"),
        (sign_document("roles", UNNAMED | {"expires": HUGE}, ROOT), "expires: "),
    ],
)
def test_roles_that_must_not_be_believed(data, message):
    with pytest.raises(BadSignature, match=message):
        open_it(data)


def open_newest(data: bytes) -> Latest:
    return open_latest(data, run="run", publishers={KEY.public_hex})


def test_latest_opens_for_its_publisher():
    latest = open_newest(sign_latest("run", 7, DIGEST, KEY))
    assert (latest.run, latest.version, latest.manifest_digest) == ("run", 7, DIGEST)
    assert latest.expires - latest.issued == 600.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run": "other"}, "of run 'other', not 'run'"),
        ({"version": -1}, "version: Input should be greater"),
        ({"version": True}, "version: Input should be a valid integer"),
        ({"manifest_digest": "../../etc"}, "manifest_digest: 64 hex characters are needed"),
        ({"expires": "soon"}, "expires: "),
        ({"expires": HUGE}, "expires: "),
        ({"expires": 2**53}, "expires: "),
        ({"issued": True}, "issued: "),
        ({"issued": -1}, "issued: "),
        ({"issued": 0.0, "expires": 1.0}, "expired"),
        ({"issued": time.time() + DAY, "expires": time.time() + 2 * DAY}, "future"),
        ({"more": 1}, "more: Unexpected"),
    ],
)
def test_latest_that_must_not_be_believed(change, message):
    now = time.time()
    payload = asdict(Latest("run", 7, DIGEST, now, now + 60)) | change
    with pytest.raises(BadSignature, match=message):
        open_newest(sign_document("latest", payload, KEY))


def test_keys_survive_a_file_and_stay_private(tmp_path):
    path = tmp_path / "worker.key"
    KEY.save(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    again = SigningKey.load(path)
    assert signature_is_valid(KEY.public_hex, b"message", again.sign(b"message"))
    assert not signature_is_valid(KEY.public_hex, b"other", again.sign(b"message"))
    with pytest.raises(FileExistsError):
        STRANGER.save(path)
    assert SigningKey.load(path).public_hex == KEY.public_hex
    assert list(tmp_path.iterdir()) == [path]


def test_parts_of_a_hash_are_told_apart():
    hashes = {hash_parts(*parts) for parts in (("ab", "c"), ("a", "bc"), (1, 2), (2, 1), (b"\1",))}
    assert len(hashes) == 5
    assert hash_parts("a") == hash_parts(b"a")


@weak
def test_a_signature_that_anybody_can_make_is_refused(public_hex):
    forged = WeakKey(public_hex).sign(b"message")
    library = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_hex))
    library.verify(bytes.fromhex(forged), b"message")  # it has no such check

    assert not signature_is_valid(public_hex, b"message", forged)
    document = sign_document("lease", {"version": 9}, WeakKey(public_hex))
    with pytest.raises(BadSignature, match="does not match"):
        opened(document, keys={public_hex})


def test_only_numbers_below_the_prime_are_keys_and_all_that_we_make_are():
    for y in range(PRIME, 2**255):
        for sign in (0, 2**255):
            assert not is_public_key((y + sign).to_bytes(32, "little").hex())
    assert all(is_public_key(SigningKey.generate().public_hex) for _ in range(100))


@weak
def test_no_role_is_given_to_a_weak_key(public_hex):
    data = sign_roles("run", {**HELD, "validator": [public_hex]}, ROOT, valid_s=60.0)
    with pytest.raises(BadSignature, match=r"roles\.validator\.0: a public key is needed"):
        open_it(data)
    with pytest.raises(BadSignature, match="does not match"):
        open_roles(roles(root=WeakKey(public_hex)), root_public_key=public_hex, run="run")


@weak
def test_no_invite_names_a_weak_key(public_hex):
    """Whoever signed it: a proof of the invite's secret could be made without the secret."""
    worker = STRANGER.public_hex
    used = use_invite(make_invite("run", pool=None, uses=1, valid_s=60.0, coordinator=KEY), worker)
    fields = {"run": "run", "key": public_hex, "pool": None, "uses": 1, "expires": 2.0**40}
    used["document"] = sign_document("invite", fields, KEY).decode()
    used["proof"] = sign_document("invited", {"worker": worker}, WeakKey(public_hex)).decode()
    with pytest.raises(BadSignature, match="invite: key: a public key is needed"):
        open_invite(used, run="run", worker=worker, coordinators={KEY.public_hex}, now=0.0)
