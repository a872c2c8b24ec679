"""Public keys of ed25519 as which anybody can sign, and signatures of theirs."""

from __future__ import annotations

from hashlib import sha512
from itertools import count

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from runspec.core.signed import SigningKey

PRIME = 2**255 - 19
ORDER = 2**252 + 27742317777372353535851937790883648493
"""Of the base point."""
_OF_ORDER_8 = int.from_bytes(
    bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05"), "little"
)
_SIGN = 2**255

WEAK_KEYS = [
    (y + sign).to_bytes(32, "little").hex()
    # The last two are 0 and 1 again, as numbers that are not below the prime.
    for y in (0, 1, PRIME - 1, _OF_ORDER_8, PRIME - _OF_ORDER_8, PRIME, PRIME + 1)
    for sign in (0, _SIGN)
]
"""All 14 encodings of the eight points of low order: "Taming the many EdDSAs" (eprint 2020/1244),
tables 1 and 2."""


class WeakKey(SigningKey):
    """Signs in the name of a weak key, without any secret."""

    def __init__(self, public_hex: str) -> None:
        self.public_hex = public_hex

    def sign(self, message: bytes) -> str:
        """A signature that the library accepts, 128 hexadecimal characters.

        With R = s B the equation s B = R + k A holds wherever k A = 0. k is the hash of R, A and
        the message: at least one in eight is divisible by the order of A.
        """
        public = Ed25519PublicKey.from_public_bytes(bytes.fromhex(self.public_hex))
        for number in count():
            secret = number.to_bytes(32, "little")
            point = Ed25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()
            scalar = int.from_bytes(sha512(secret).digest()[:32], "little")
            clamped = scalar & (2**254 - 8) | 2**254  # RFC 8032, 5.1.5
            signature = point + (clamped % ORDER).to_bytes(32, "little")
            try:
                public.verify(signature, message)
            except InvalidSignature:
                continue
            return signature.hex()
        raise AssertionError("count() is endless")
