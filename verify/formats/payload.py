"""Payloads of signed documents as frozen dataclasses, whose annotations constrain the fields."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from runspec.core.canonical import canonical_json
from runspec.core.hashing import is_digest
from runspec.core.signed import BadSignature

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


def open_payload(codec: TypeAdapter[T], payload: dict[str, Any], name: str) -> T:
    """Check a payload whose signature has been checked, and return its value.

    Args:
        codec: adapter of the value's type.
        payload: payload of the document.
        name: kind of the document, for the message.

    Raises:
        BadSignature: a field is missing, unknown, of another type or out of range.
    """
    try:
        # Validated as JSON, because strict fields accept its lists and numbers.
        return codec.validate_json(canonical_json(payload))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])[:80]
        raise BadSignature(f"{name}: {field}: {first['msg'][:120]}") from error
