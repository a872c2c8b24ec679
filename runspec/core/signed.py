"""Signed JSON documents: the envelope of roles.json, leases, manifests, latest.json and others.

An envelope is canonical JSON {"kind", "payload", "key", "algorithm", "signature"}. The signature
covers a domain prefix, the kind and the canonical payload, so that a document of one kind is never
valid as another kind.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.hashing import is_digest
from runspec.core.keys import SigningKey, is_public_key, signature_is_valid

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
    return canonical_json(
        {
            "kind": kind,
            "payload": payload,
            "key": key.public_hex,
            "algorithm": ALGORITHM,
            "signature": key.sign(_message(kind, payload)),
        }
    )


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
