"""Invitations to a run: a holder may register a limited number of keys for a limited time.

An invite has its own key, which a document signed by the coordinator names. Its secret travels only
in the join link of a volunteer. A worker signs its own public key with the secret, so that a reader
of its request cannot use the invite again.

    invite=<base64url of the document>.<secret, 64 hex characters>        in a join link
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter

from runspec.core.hashing import is_digest
from runspec.core.keys import SigningKey
from runspec.core.signed import (
    STRICT,
    BadSignature,
    PublicKey,
    Time,
    open_document,
    open_payload,
    sign_document,
)

KIND, PROOF_KIND = "invite", "invited"
MAX_BYTES = 1024
MAX_TEXT = 1500
"""Characters of an invite in a link."""
MAX_USES = 1_000_000


@dataclass(frozen=True)
class Invite:
    """Document that the coordinator's key signs."""

    __pydantic_config__ = STRICT

    run: str
    key: PublicKey
    """Public key of the invite, by which its uses are counted."""
    pool: str | None
    """Pool that it is for; None: any."""
    uses: Annotated[int, Field(gt=0, le=MAX_USES)]
    """Number of keys that may be registered with it."""
    expires: Time


_CODEC = TypeAdapter(Invite)


def make_invite(
    run: str, *, pool: str | None, uses: int, valid_s: float, coordinator: SigningKey
) -> str:
    """Return the text of a new invite.

    Args:
        run: name of the run.
        pool: the only pool that it is for, if any.
        uses: number of keys that may be registered with it.
        valid_s: seconds until it expires.
        coordinator: key of the run's coordinator.
    """
    secret = SigningKey.generate()
    invite = Invite(run, secret.public_hex, pool, uses, time.time() + valid_s)
    document = sign_document(KIND, asdict(invite), coordinator)
    return f"{base64.urlsafe_b64encode(document).decode()}.{secret.secret_hex}"


def invite_key(text: str) -> str:
    """Return the public key of an invite, by which it is revoked. Any signer is accepted.

    Raises:
        BadSignature: the text is not an invite.
    """
    key = open_document(
        _document(text).encode(), kind=KIND, keys=None, max_bytes=MAX_BYTES
    ).payload.get("key")
    if not is_digest(key):
        raise BadSignature("invite: its key is malformed")
    return str(key)


def use_invite(text: str, worker: str) -> dict[str, str]:
    """Return the part of a registration that uses an invite: its document and a proof.

    Args:
        text: text of the invite.
        worker: public key of the worker.

    Raises:
        BadSignature: the text is not an invite.
    """
    document, secret = _document(text), text.partition(".")[2]
    if len(text) > MAX_TEXT or not is_digest(secret):
        raise BadSignature("invite: no <document>.<secret>")
    proof = sign_document(PROOF_KIND, {"worker": worker}, SigningKey.from_secret(secret))
    return {"document": document, "proof": proof.decode()}


def _document(text: str) -> str:
    try:
        return base64.b64decode(text.partition(".")[0], altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise BadSignature(f"invite: not base64: {error}") from error


def open_invite(
    used: object, *, run: str, worker: str, coordinators: Collection[str], now: float
) -> Invite:
    """Check an invite that a worker sent; the caller counts its uses.

    Args:
        used: the result of `use_invite`.
        run: name of the run.
        worker: public key of the worker.
        coordinators: keys that may invite.
        now: seconds since the epoch.

    Raises:
        BadSignature: malformed, not signed, of another run, expired, or proof of another worker.
    """
    if not isinstance(used, dict) or set(used) != {"document", "proof"}:
        raise BadSignature("invite: document and proof are needed")
    document, proof = used["document"], used["proof"]
    if not (isinstance(document, str) and isinstance(proof, str)):
        raise BadSignature("invite: document and proof must be text")
    invite, _ = open_payload(
        _CODEC, document.encode(), kind=KIND, keys=coordinators, max_bytes=MAX_BYTES
    )
    if invite.run != run:
        raise BadSignature(f"invite: of run {invite.run[:80]!r}, not {run!r}")
    if now > invite.expires:
        raise BadSignature(f"invite: expired {now - invite.expires:.0f} s ago")
    shown = open_document(
        proof.encode(), kind=PROOF_KIND, keys=frozenset({invite.key}), max_bytes=MAX_BYTES
    )
    if shown.payload != {"worker": worker}:
        raise BadSignature("invite: the proof is for another key")
    return invite
