"""What a publisher looks at in a roles.json before it publishes with it.

(Its signature is for clients to check: they pin the root's key.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.keys import SigningKey
from runspec.core.roles import KIND, MAX_BYTES
from runspec.core.signed import BadSignature, open_document


def publishers_of(roles: bytes, run: str, key: SigningKey) -> list[str]:
    """The publishers' keys; early and clear, what every client would say later."""
    payload = _payload(roles)
    publishers: list[str] = payload["roles"]["publisher"] if payload["run"] == run else []
    if key.public_hex not in publishers:
        raise UserError(
            f"roles.json does not name {key.public_hex[:16]} a publisher of run {run!r}",
            remedy="publish with a publisher's key, or sign a roles.json that names this one",
        )
    return publishers


def check_newest(path: Path, roles: bytes) -> None:
    """Refuses a roles.json that is older than the one at `path`.

    It would let those who are new to the run believe a revoked key.
    """
    if not path.exists():
        return
    try:
        stored = _payload(read_bounded(path, MAX_BYTES))
    except UserError:  # damaged: anything is better
        return
    given = _payload(roles)
    if given["run"] == stored["run"] and given["issued"] < stored["issued"]:
        raise UserError(
            "this roles.json is newer than the one to publish with",
            place=str(path),
            remedy="put the newest roles.json beside the key",
        )


def _payload(roles: bytes) -> dict[str, Any]:
    """What it says, of the right form."""
    try:
        payload = open_document(roles, kind=KIND, keys=None, max_bytes=MAX_BYTES).payload
        run, issued, publishers = payload["run"], payload["issued"], payload["roles"]["publisher"]
        types = isinstance(run, str), isinstance(issued, int | float), isinstance(publishers, list)
        if not all(types):
            raise TypeError("run, issued or publisher is malformed")
    except (BadSignature, KeyError, TypeError) as error:
        raise UserError(f"cannot read roles.json: {error}", remedy="sign a new one") from error
    return payload
