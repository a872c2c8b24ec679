"""Payloads of signed documents as frozen dataclasses, whose annotations constrain the fields."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from runspec.core.canonical import canonical_json
from runspec.core.hashing import is_digest
from runspec.core.signed import BadSignature, open_document

T = TypeVar("T")


def _digest(text: str) -> str:
    if not is_digest(text):
        raise ValueError("64 hex characters are needed")
    return text


STRICT = ConfigDict(extra="forbid", strict=True)
"""`__pydantic_config__` of a payload: no other fields, and no values of another type."""
Digest = Annotated[str, AfterValidator(_digest)]
"""A BLAKE3 digest, a public key, or a nonce: 64 hex characters."""
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
        raise BadSignature(f"{kind}: {field}: {first['msg'][:120]}") from error
