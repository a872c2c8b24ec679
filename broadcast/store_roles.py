"""The roles.json that a store is published with: who may publish, and that it is the newest.

Its signature is not checked here: the clients pin the root's key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runspec.core import roles as roles_format
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.keys import SigningKey
from runspec.core.roles import Signers
from runspec.core.signed import BadSignature, open_document


def signers_of(roles: bytes, run: str, key: SigningKey, who: Signers = "publisher") -> list[str]:
    """Return the signers' keys in a roles.json; refuse what every client would refuse later.

    Raises:
        UserError: `key` is none of them, or the document is malformed or of another run.
    """
    payload = _payload(roles)
    keys = payload["roles"]["publisher"] if who == "publisher" else payload["islands"].values()
    if payload["run"] != run or key.public_hex not in keys:
        raise UserError(
            f"roles.json does not name {key.public_hex[:16]} as {who} of run {run!r}",
            remedy="publish with a key that it names, or sign a roles.json that names this one",
        )
    return list(keys)


def check_newest(path: Path, roles: bytes) -> None:
    """Refuse a roles.json older than the one at `path`: new clients would trust a revoked key."""
    if not path.exists():
        return
    try:
        stored = _payload(read_bounded(path, roles_format.MAX_BYTES))
    except UserError:  # a damaged one may be replaced
        return
    given = _payload(roles)
    if given["run"] == stored["run"] and given["issued"] < stored["issued"]:
        raise UserError(
            "this roles.json is newer than the one to publish with",
            place=str(path),
            remedy="put the newest roles.json beside the key",
        )


def _payload(roles: bytes) -> dict[str, Any]:
    """Return the payload of a roles.json after a check of its form."""
    try:
        payload = open_document(
            roles, kind=roles_format.KIND, keys=None, max_bytes=roles_format.MAX_BYTES
        ).payload
        run, issued, publishers = payload["run"], payload["issued"], payload["roles"]["publisher"]
        islands = payload.setdefault("islands", {})
        types = (
            *(isinstance(run, str), isinstance(issued, int | float)),
            *(isinstance(publishers, list), isinstance(islands, dict)),
        )
        if not all(types):
            raise TypeError("run, issued, publisher or islands is malformed")
    except (BadSignature, KeyError, TypeError) as error:
        raise UserError(f"cannot read roles.json: {error}", remedy="sign a new one") from error
    return payload
