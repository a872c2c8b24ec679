"""roles.json and invitations, which say what keys may do in a run, and latest.json.

roles.json has the keys of the roles and of the learner islands, signed by the root key.

latest.json is the publisher's short-lived statement of the newest policy version.

A holder of an invite may register a limited number of keys for a limited time. An invite has its
own key, which a document signed by the coordinator names. Its secret travels only in the join link
of a volunteer. A worker signs its own public key with the secret, so that a reader of its request
cannot use the invite again.

    invite=<base64url of the document>.<secret, 64 hex characters>        in a join link
"""

from __future__ import annotations

import base64
import binascii
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from runspec.core import signed
from runspec.core.canonical import MalformedJson, is_digest, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded

KIND = "roles"
ROLE_NAMES = ("publisher", "coordinator", "validator")
MAY_BE = ("evaluator",)
"""Roles that not every run has."""
Signers = Literal["publisher", "island"]
"""Roles whose keys may sign the versions of a store: publishers, or the learner's islands."""
MAX_BYTES = 64 * 1024
OWN_WORKERS_FILE = "workers.json"


@dataclass(frozen=True)
class Roles:
    """Checked contents of roles.json: public keys by role; times in seconds since the epoch."""

    run: str
    issued: float
    expires: float
    publisher: frozenset[str]
    coordinator: frozenset[str]
    validator: frozenset[str]
    evaluator: frozenset[str] = frozenset()
    islands: Mapping[str, str] = field(default_factory=dict)
    """Public key of each learner island by its name; empty for a run with one learner."""

    @property
    def keys(self) -> frozenset[str]:
        """All keys that have a role."""
        held = self.publisher | self.coordinator | self.validator | self.evaluator
        return held.union(self.islands.values())

    def signers(self, who: Signers) -> frozenset[str]:
        """Return the keys that may sign the versions of a store."""
        return self.publisher if who == "publisher" else frozenset(self.islands.values())


@dataclass(frozen=True)
class _Payload:
    """Payload of roles.json."""

    __pydantic_config__ = signed.STRICT

    run: str
    issued: signed.Time
    expires: signed.Time
    roles: dict[str, list[signed.PublicKey]]
    islands: dict[str, signed.PublicKey] = field(default_factory=dict)


_CODEC_OF_ROLES = TypeAdapter(_Payload)


def sign_roles(
    run: str,
    keys: dict[str, list[str]],
    root: signed.SigningKey,
    *,
    valid_s: float,
    now: float | None = None,
    islands: Mapping[str, str] | None = None,
) -> bytes:
    """Return a signed roles.json.

    Args:
        run: name of the run.
        keys: public keys (hexadecimal) for each of ROLE_NAMES, and for those of MAY_BE that there
            are.
        root: the root key.
        valid_s: seconds until it expires.
        now: seconds since the epoch; the present time if None.
        islands: public key of each learner island by its name.
    """
    if set(keys) - set(MAY_BE) != set(ROLE_NAMES):
        raise ValueError(f"roles {sorted(keys)} instead of {sorted(ROLE_NAMES)}")
    issued = time.time() if now is None else now
    payload = {"run": run, "issued": issued, "expires": issued + valid_s, "roles": keys}
    if islands:
        payload["islands"] = dict(islands)
    return signed.sign_document(KIND, payload, root)


def open_roles(
    data: bytes, *, root_public_key: str | None, run: str, now: float | None = None
) -> Roles:
    """Check a roles.json against the pinned root key.

    Args:
        data: the signed bytes.
        root_public_key: the pinned key; None accepts any, for what others check later.
        run: name of the run.
        now: seconds since the epoch; the present time if None.

    Raises:
        BadSignature: of another root or run, expired, from the future, or malformed.
    """
    keys = None if root_public_key is None else {root_public_key}
    found, _ = signed.open_payload(_CODEC_OF_ROLES, data, kind=KIND, keys=keys, max_bytes=MAX_BYTES)
    if found.run != run:
        raise signed.BadSignature(f"roles: not for run {run!r}")
    check_times(KIND, found.issued, found.expires, time.time() if now is None else now)
    if set(found.roles) - set(MAY_BE) != set(ROLE_NAMES):
        raise signed.BadSignature("roles: must name exactly publisher, coordinator and validator")
    held = {name: frozenset(named) for name, named in found.roles.items()}
    return Roles(run, found.issued, found.expires, **held, islands=found.islands)


def check_times(kind: str, issued: float, expires: float, now: float) -> None:
    """Check when a document is valid, in seconds since the epoch, allowing for clock skew.

    Raises:
        BadSignature: the document is expired or from the future.
    """
    if now > expires + signed.CLOCK_SKEW_S:
        raise signed.BadSignature(f"{kind}: expired {now - expires:.0f} s ago")
    if issued > now + signed.CLOCK_SKEW_S:
        raise signed.BadSignature(f"{kind}: issued {issued - now:.0f} s in the future")


def issued_at(data: bytes) -> float:
    """Return when a roles.json says that it was issued; `open_roles` checks the signature.

    Raises:
        BadSignature: it is no roles.json.
    """
    found, _ = signed.open_payload(_CODEC_OF_ROLES, data, kind=KIND, keys=None, max_bytes=MAX_BYTES)
    return found.issued


def read_own_workers(keys: Path) -> dict[str, str]:
    """Return the public keys of the run's own workers by name, from workers.json.

    Empty if the file is missing.

    Args:
        keys: the folder of workers.json and roles.json.

    Raises:
        UserError: the file cannot be read.
    """
    path = keys / OWN_WORKERS_FILE
    try:
        own = parse_object(read_bounded(path, MAX_BYTES), max_bytes=MAX_BYTES)
    except FileNotFoundError:
        return {}
    except (OSError, MalformedJson) as error:
        raise UserError(
            f"cannot be read: {error}", place=str(path), remedy="remove it, then apply again"
        ) from error
    return {name: key for name, key in own.items() if signed.is_public_key(key)}


INVITE_KIND, PROOF_KIND = "invite", "invited"
MAX_INVITE_BYTES = 1024
MAX_TEXT = 1500
"""Characters of an invite in a link."""
MAX_USES = 1_000_000


@dataclass(frozen=True)
class Invite:
    """Document that the coordinator's key signs."""

    __pydantic_config__ = signed.STRICT

    run: str
    key: signed.PublicKey
    """Public key of the invite, by which its uses are counted."""
    pool: str | None
    """Pool that it is for; None: any."""
    uses: Annotated[int, Field(gt=0, le=MAX_USES)]
    """Number of keys that may be registered with it."""
    expires: signed.Time


_CODEC = TypeAdapter(Invite)


def make_invite(
    run: str, *, pool: str | None, uses: int, valid_s: float, coordinator: signed.SigningKey
) -> str:
    """Return the text of a new invite.

    Args:
        run: name of the run.
        pool: the only pool that it is for, if any.
        uses: number of keys that may be registered with it.
        valid_s: seconds until it expires.
        coordinator: key of the run's coordinator.
    """
    secret = signed.SigningKey.generate()
    invite = Invite(run, secret.public_hex, pool, uses, time.time() + valid_s)
    document = signed.sign_document(INVITE_KIND, asdict(invite), coordinator)
    return f"{base64.urlsafe_b64encode(document).decode()}.{secret.secret_hex}"


def invite_key(text: str) -> str:
    """Return the public key of an invite, by which it is revoked. Any signer is accepted.

    Raises:
        BadSignature: the text is not an invite.
    """
    key = signed.open_document(
        _document(text).encode(), kind=INVITE_KIND, keys=None, max_bytes=MAX_INVITE_BYTES
    ).payload.get("key")
    if not is_digest(key):
        raise signed.BadSignature("invite: its key is malformed")
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
        raise signed.BadSignature("invite: no <document>.<secret>")
    proof = signed.sign_document(
        PROOF_KIND, {"worker": worker}, signed.SigningKey.from_secret(secret)
    )
    return {"document": document, "proof": proof.decode()}


def _document(text: str) -> str:
    try:
        return base64.b64decode(text.partition(".")[0], altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError) as error:
        raise signed.BadSignature(f"invite: not base64: {error}") from error


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
        raise signed.BadSignature("invite: document and proof are needed")
    document, proof = used["document"], used["proof"]
    if not (isinstance(document, str) and isinstance(proof, str)):
        raise signed.BadSignature("invite: document and proof must be text")
    invite, _ = signed.open_payload(
        _CODEC, document.encode(), kind=INVITE_KIND, keys=coordinators, max_bytes=MAX_INVITE_BYTES
    )
    if invite.run != run:
        raise signed.BadSignature(f"invite: of run {invite.run[:80]!r}, not {run!r}")
    if now > invite.expires:
        raise signed.BadSignature(f"invite: expired {now - invite.expires:.0f} s ago")
    shown = signed.open_document(
        proof.encode(), kind=PROOF_KIND, keys=frozenset({invite.key}), max_bytes=MAX_INVITE_BYTES
    )
    if shown.payload != {"worker": worker}:
        raise signed.BadSignature("invite: the proof is for another key")
    return invite


LATEST = "latest"
MAX_LATEST_BYTES = 4 * 1024
VALID_S = 600.0
RESIGN_EVERY_S = 60.0


@dataclass(frozen=True)
class Latest:
    """The newest published version; times are seconds since the epoch."""

    __pydantic_config__ = signed.STRICT

    run: str
    version: signed.Natural
    manifest_digest: signed.Digest
    issued: signed.Time
    expires: signed.Time


_CODEC_OF_LATEST = TypeAdapter(Latest)


def sign_latest(run: str, version: int, manifest_digest: str, key: signed.SigningKey) -> bytes:
    now = time.time()
    return signed.sign_document(
        LATEST, asdict(Latest(run, version, manifest_digest, now, now + VALID_S)), key
    )


def open_latest(data: bytes, *, run: str, publishers: Collection[str], old: bool = False) -> Latest:
    """Check a latest.json.

    Args:
        data: the signed bytes.
        run: the only run accepted.
        publishers: keys that may sign it.
        old: accept one that has expired, as that of a run that has ended.

    Raises:
        BadSignature: not signed by a publisher, of another run, expired, from the future, or
            malformed.
    """
    latest, _ = signed.open_payload(
        _CODEC_OF_LATEST, data, kind=LATEST, keys=publishers, max_bytes=MAX_LATEST_BYTES
    )
    if latest.run != run:
        raise signed.BadSignature(f"latest: of run {latest.run[:80]!r}, not {run!r}")
    now = min(time.time(), latest.issued) if old else time.time()
    check_times(LATEST, latest.issued, latest.expires, now)
    return latest
