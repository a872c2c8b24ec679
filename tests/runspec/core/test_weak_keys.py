"""Keys of low order, and keys in a second spelling: anybody can sign as one, so none may sign."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from runspec.core.invite import make_invite, open_invite, use_invite
from runspec.core.keys import SigningKey, is_public_key, signature_is_valid
from runspec.core.roles import open_roles, sign_roles
from runspec.core.signed import BadSignature, open_document, sign_document
from tests.weak_keys import PRIME, WEAK_KEYS, WeakKey

weak = pytest.mark.parametrize("public_hex", WEAK_KEYS)


@weak
def test_a_signature_that_anybody_can_make_is_refused(public_hex: str):
    forged = WeakKey(public_hex).sign(b"message")
    library = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_hex))
    library.verify(bytes.fromhex(forged), b"message")  # it has no such check

    assert not signature_is_valid(public_hex, b"message", forged)
    document = sign_document("latest", {"version": 9}, WeakKey(public_hex))
    with pytest.raises(BadSignature, match="does not match"):
        open_document(document, kind="latest", keys={public_hex}, max_bytes=10_000)


@pytest.mark.parametrize("y", range(PRIME, 2**255))
def test_a_number_that_is_not_below_the_prime_is_no_key(y: int):
    for sign in (0, 2**255):
        assert not is_public_key((y + sign).to_bytes(32, "little").hex())


def test_every_key_that_we_make_is_one():
    assert all(is_public_key(SigningKey.generate().public_hex) for _ in range(100))


@weak
def test_no_role_is_given_to_one(public_hex: str):
    def opened(root: SigningKey, *validators: str) -> object:
        held = {"publisher": [], "coordinator": [], "validator": list(validators)}
        data = sign_roles("run", held, root, valid_s=60.0)
        return open_roles(data, root_public_key=root.public_hex, run="run")

    with pytest.raises(BadSignature, match="validator must be a list of public keys"):
        opened(SigningKey.generate(), public_hex)
    with pytest.raises(BadSignature, match="does not match"):
        opened(WeakKey(public_hex))


@weak
def test_no_invite_names_one(public_hex: str):
    """Whoever signed it: a proof of the invite's secret could be made without the secret."""
    coordinator, worker = SigningKey.generate(), SigningKey.generate().public_hex
    used = use_invite(
        make_invite("run", pool=None, uses=1, valid_s=60.0, coordinator=coordinator), worker
    )
    fields = {"run": "run", "key": public_hex, "pool": None, "uses": 1, "expires": 2.0**40}
    used["document"] = sign_document("invite", fields, coordinator).decode()
    forger = WeakKey(public_hex)
    used["proof"] = sign_document("invited", {"worker": worker}, forger).decode()
    with pytest.raises(BadSignature, match="invite: run or key is malformed"):
        open_invite(used, run="run", worker=worker, coordinators={coordinator.public_hex}, now=0.0)
