"""Ed25519 keys: public keys as 64 hexadecimal characters, private keys in PEM files."""

from __future__ import annotations

import re
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from runspec.core.errors import UserError
from runspec.core.files import atomic_file
from runspec.core.hashing import is_digest

_SIGNATURE = re.compile(r"[0-9a-f]{128}")
_PRIME = 2**255 - 19
_ORDER_8 = 0x7A03AC9277FDC74EC6CC392CFA53202A0F67100D760B3CBA4FD84D3D706A17C7
_LOW_ORDER = {0, 1, _PRIME - 1, _ORDER_8, _PRIME - _ORDER_8}
"""y coordinates of the eight points whose order divides 8 ("Taming the many EdDSAs", eprint
2020/1244, table 1; libsodium's `ge25519_has_small_order` has the same)."""


class SigningKey:
    """Private key, with its public key in hexadecimal."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public_hex: str = private.public_key().public_bytes_raw().hex()

    @classmethod
    def generate(cls) -> SigningKey:
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_secret(cls, secret_hex: str) -> SigningKey:
        """Return the key of a secret, 64 hexadecimal characters."""
        return cls(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret_hex)))

    @property
    def secret_hex(self) -> str:
        """Secret of the key, 64 hexadecimal characters."""
        return self._private.private_bytes_raw().hex()

    @classmethod
    def load(cls, path: Path) -> SigningKey:
        """Read an unencrypted PKCS#8 PEM file.

        Raises:
            UserError: it cannot be read, or holds another kind of key.
        """
        try:
            private = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"cannot read a signing key: {error}",
                place=str(path),
                remedy="make keys with `python -m broadcast keygen DIR`",
            ) from error
        if not isinstance(private, Ed25519PrivateKey):
            raise UserError(
                "not an ed25519 key",
                place=str(path),
                remedy="make keys with `python -m broadcast keygen DIR`",
            )
        return cls(private)

    def save(self, path: Path) -> None:
        """Write a PEM file that only its owner can read.

        Raises:
            FileExistsError: the file exists already.
            UserError: it cannot be written; no partial file is left.
        """
        pem = self._private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        with atomic_file(path, mode=0o600, overwrite=False, what="a signing key") as file:
            file.write(pem)

    def sign(self, message: bytes) -> str:
        """Return the signature, 128 hexadecimal characters."""
        return self._private.sign(message).hex()


def is_public_key(text: object) -> bool:
    """Return whether `text` is a valid public key: 64 lower-case hexadecimal characters.

    Points of low order are refused: anybody can sign for them, and cryptography's `verify` accepts
    that. A y that is not below the prime is refused: it is a second encoding of another point
    (RFC 8032, 5.1.3).
    """
    if not is_digest(text):
        return False
    y = int.from_bytes(bytes.fromhex(str(text)), "little") % 2**255  # the top bit is the sign of x
    return y < _PRIME and y not in _LOW_ORDER


def signature_is_valid(public_hex: str, message: bytes, signature_hex: str) -> bool:
    """Return whether a signature is valid for a key and a message; malformed input is False."""
    if not is_public_key(public_hex):
        return False
    if not isinstance(signature_hex, str) or _SIGNATURE.fullmatch(signature_hex) is None:
        return False  # fromhex accepts capitals and blanks, but a signature has one encoding
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_hex))
        key.verify(bytes.fromhex(signature_hex), message)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True
