"""The resolved spec as the coordinator hands it out: signed, so that workers can believe it."""

from __future__ import annotations

from runspec.core.canonical import canonical_json, parse_object
from runspec.core.keys import SigningKey
from runspec.core.signed import open_document, sign_document
from runspec.core.spec.resolved import MAX_BYTES as MAX_SPEC_BYTES
from runspec.core.spec.resolved import dump_resolved, parse_resolved
from runspec.core.spec.schema import RunSpec

KIND = "spec"
MAX_BYTES = MAX_SPEC_BYTES + 4 * 1024


def sign_spec(spec: RunSpec, key: SigningKey) -> bytes:
    return sign_document(KIND, parse_object(dump_resolved(spec), max_bytes=MAX_SPEC_BYTES), key)


def open_spec(data: bytes, *, coordinators: frozenset[str], place: str) -> RunSpec:
    """Checks and reads a signed spec.

    Args:
        data: the document.
        coordinators: public keys that may sign it.
        place: where it came from, for the message.

    Raises:
        BadSignature: not a coordinator's.
        UserError: signed, but not a spec that this release can read.
    """
    payload = open_document(data, kind=KIND, keys=coordinators, max_bytes=MAX_BYTES).payload
    return parse_resolved(canonical_json(payload), place=place)
