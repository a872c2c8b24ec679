"""Ed25519 keys, and signed JSON documents: roles.json, leases, manifests, latest.json and others.

Public keys are 64 hexadecimal characters; private keys lie in PEM files.

An envelope is canonical JSON {"kind", "payload", "key", "algorithm", "signature"}. The signature
covers a domain prefix, the kind and the canonical payload, so that a document of one kind is never
valid as another kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from runspec.core.canonical import MalformedJson, canonical_json, is_digest, parse_object
from runspec.core.errors import UserError
from runspec.core.files import atomic_file

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
        remedy = "make keys with `python -m broadcast keygen DIR`"
        try:
            private = serialization.load_pem_private_key(path.read_bytes(), password=None)
        except (OSError, ValueError, TypeError) as error:
            trouble = f"cannot read a signing key: {error}"
            raise UserError(trouble, place=str(path), remedy=remedy) from error
        if not isinstance(private, Ed25519PrivateKey):
            raise UserError("not an ed25519 key", place=str(path), remedy=remedy)
        return cls(private)

    def save(self, path: Path) -> None:
        """Write a PEM file that only its owner can read.

        Raises:
            FileExistsError: the file exists already.
            UserError: it cannot be written; no partial file is left.
        """
        how = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        pem = self._private.private_bytes(*how, serialization.NoEncryption())
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


ALGORITHM = "ed25519"
CLOCK_SKEW_S = 300.0
"""Seconds by which the clocks of two machines may differ."""
_FIELDS = {"kind", "payload", "key", "algorithm", "signature"}


class BadSignature(ValueError):
    """Error: a document is malformed, of another kind, or not signed by an allowed key."""


@dataclass(frozen=True)
class SignedDocument:
    """Document with a valid signature."""

    kind: str
    payload: dict[str, Any]
    key: str


def sign_document(kind: str, payload: dict[str, Any], key: SigningKey) -> bytes:
    """Return the signed envelope as canonical JSON bytes."""
    signed = {"kind": kind, "payload": payload, "key": key.public_hex, "algorithm": ALGORITHM}
    return canonical_json(signed | {"signature": key.sign(_message(kind, payload))})


def open_document(
    data: bytes, *, kind: str, keys: Collection[str] | None, max_bytes: int
) -> SignedDocument:
    """Check an untrusted envelope and return its document.

    Args:
        data: the envelope.
        kind: the only kind accepted.
        keys: public keys that may sign it; None accepts any key, and the caller checks `.key`.
        max_bytes: a larger envelope is refused before it is parsed.

    Raises:
        BadSignature: the document is not valid.
    """
    try:
        envelope = parse_object(data, max_bytes=max_bytes)
    except MalformedJson as error:
        raise BadSignature(f"{kind}: not a signed document: {error}") from error
    if set(envelope) != _FIELDS:
        raise BadSignature(f"{kind}: fields {sorted(envelope)} instead of {sorted(_FIELDS)}")
    if envelope["kind"] != kind:
        raise BadSignature(f"{kind} expected, got kind {str(envelope['kind'])[:80]!r}")
    if envelope["algorithm"] != ALGORITHM:
        raise BadSignature(f"{kind}: unknown algorithm {str(envelope['algorithm'])[:80]!r}")
    payload, key, signature = envelope["payload"], envelope["key"], envelope["signature"]
    if not (isinstance(payload, dict) and isinstance(key, str) and isinstance(signature, str)):
        raise BadSignature(f"{kind}: payload, key or signature has the wrong type")
    if keys is not None and key not in keys:
        raise BadSignature(f"{kind}: signed by {key[:16]}, which may not sign it")
    if not signature_is_valid(key, _message(kind, payload), signature):
        raise BadSignature(f"{kind}: the signature does not match")
    return SignedDocument(kind, payload, key)


T = TypeVar("T")


def _requires(holds: Callable[[str], bool], needed: str) -> AfterValidator:
    def checked(text: str) -> str:
        if not holds(text):
            raise ValueError(f"{needed} needed")
        return text

    return AfterValidator(checked)


STRICT = ConfigDict(extra="forbid", strict=True)
"""`__pydantic_config__` of a payload, a frozen dataclass whose annotations constrain its fields: no
other fields, and no values of another type."""
Digest = Annotated[str, _requires(is_digest, "64 hex characters are")]
"""A BLAKE3 digest, a public key, or a nonce: 64 hex characters."""
PublicKey = Annotated[str, _requires(is_public_key, "a public key is")]
Natural = Annotated[int, Field(ge=0, lt=2**31)]
Time = Annotated[float, Field(ge=0, lt=2**53)]
"""Seconds since the epoch."""


def open_payload(
    codec: TypeAdapter[T], data: bytes, *, kind: str, keys: Collection[str] | None, max_bytes: int
) -> tuple[T, str]:
    """Check a signed document; return the value of its payload and the key that signed it.

    Args:
        codec: adapter of the value's type.
        data: the signed document.
        kind: kind of the document.
        keys: keys that may have signed it; None: any key.
        max_bytes: largest size of the document.

    Raises:
        BadSignature: the document is too large, not of the kind, or not signed by one of the keys;
            or a field is missing, unknown, of another type or out of range.
    """
    document = open_document(data, kind=kind, keys=keys, max_bytes=max_bytes)
    try:
        # Validated as JSON, because strict fields accept its lists and numbers.
        return codec.validate_json(canonical_json(document.payload)), document.key
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])[:80]
        message = first["msg"].removeprefix("Value error, ")[:120]
        raise BadSignature(f"{kind}: {field}: {message}") from error


def _message(kind: str, payload: dict[str, Any]) -> bytes:
    return b"runspec/v1\x00" + kind.encode() + b"\x00" + canonical_json(payload)
