"""roles.json: the keys of the roles and of the learner islands, signed by the root key."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.keys import SigningKey, is_public_key
from runspec.core.signed import (
    BadSignature,
    check_times,
    is_time,
    open_document,
    sign_document,
)

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


def sign_roles(
    run: str,
    keys: dict[str, list[str]],
    root: SigningKey,
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
    return sign_document(KIND, payload, root)


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
    payload = open_document(data, kind=KIND, keys=keys, max_bytes=MAX_BYTES).payload
    islands = payload.pop("islands", {})
    if set(payload) != {"run", "issued", "expires", "roles"} or payload["run"] != run:
        raise BadSignature(f"roles: not for run {run!r}")
    issued, expires, roles = payload["issued"], payload["expires"], payload["roles"]
    check_times(KIND, issued, expires, time.time() if now is None else now)
    if not isinstance(roles, dict) or set(roles) - set(MAY_BE) != set(ROLE_NAMES):
        raise BadSignature("roles: must name exactly publisher, coordinator and validator")
    for name, named in roles.items():
        if not isinstance(named, list) or not all(is_public_key(key) for key in named):
            raise BadSignature(f"roles: {name} must be a list of public keys")
    if not isinstance(islands, dict) or not all(is_public_key(key) for key in islands.values()):
        raise BadSignature("roles: islands must be public keys by name")
    held = {name: frozenset(named) for name, named in roles.items()}
    return Roles(run, float(issued), float(expires), **held, islands=islands)


def issued_at(data: bytes) -> float:
    """Return when a roles.json says that it was issued; `open_roles` checks the signature.

    Raises:
        BadSignature: it is no roles.json.
    """
    issued = open_document(data, kind=KIND, keys=None, max_bytes=MAX_BYTES).payload.get("issued")
    if not is_time(issued):
        raise BadSignature("roles: issued must be a number, of seconds since the epoch")
    return float(issued)


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
    return {name: key for name, key in own.items() if is_public_key(key)}
