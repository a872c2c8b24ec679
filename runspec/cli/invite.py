"""`runspec invite`: a join link that admits so many keys; what links there are; and their end."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from runspec.cli.view import plain_table
from runspec.cli.workers import coordinator_of, key_by_prefix
from runspec.core.address import parse_join_link
from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.hashing import is_digest
from runspec.core.keys import SigningKey
from runspec.core.roles import invite_key, make_invite
from runspec.core.signed import BadSignature
from runspec.core.spec.resolved import load_resolved
from runspec.local.endpoints import run_link
from runspec.local.run_dir import find_run

MADE_FILE = "invites.jsonl"
"""In the run directory: what was made, a line each, without the secrets."""
_MAX_LINE_BYTES = 2048


@dataclass(frozen=True)
class Made:
    """An invite as it was made; times are seconds since the epoch."""

    key: str
    """Its public key."""
    pool: str | None
    uses: int
    expires: float


def invite_command(run: str, pool: str | None, uses: int, valid_s: float, runs_dir: Path) -> int:
    """Prints the link; returns the exit code. The run need not be alive."""
    run_dir = find_run(run, runs_dir)
    spec = load_resolved(run_dir)
    pools = [each.name for each in spec.samplers]
    if pool is not None and pool not in pools:
        raise UserError(
            f"no sampler pool {pool!r}", place="--pool", remedy=f"the spec has: {', '.join(pools)}"
        )
    if pool is None and all(each.trust == "trusted" for each in spec.samplers):
        raise UserError(
            "every pool is trusted, and a trusted pool takes only invites that name it",
            place="--pool",
            remedy=f"name one: {', '.join(pools)}",
        )
    link = run_link(run_dir, spec)
    if link is None:
        raise UserError(
            "has no address and no keys yet",
            place=str(run_dir),
            remedy="start it with `runspec apply`",
        )
    text = make_invite(
        spec.name,
        pool=pool,
        uses=uses,
        valid_s=valid_s,
        coordinator=SigningKey.load(run_dir / "keys" / "coordinator.key"),
    )
    _note(run_dir, Made(invite_key(text), pool, uses, time.time() + valid_s))
    print(replace(link, invite=text))
    return 0


def list_invites(run: str, as_json: bool, runs_dir: Path) -> int:
    """Lists the invites of a run that is up, with their uses; returns the exit code."""
    coordinator = coordinator_of(run, runs_dir)
    rows = invite_rows(read_made(find_run(run, runs_dir)), coordinator.entries("invites"))
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        Console(markup=False, highlight=False, soft_wrap=True).print(invite_table(rows))
    else:
        print("nobody was invited")
    return 0


def revoke_invite(run: str, named: str, reason: str, runs_dir: Path) -> int:
    """Revokes an invite; returns the exit code.

    Args:
        named: its link, its public key, or how that begins.
    """
    coordinator = coordinator_of(run, runs_dir)
    made = [each.key for each in read_made(find_run(run, runs_dir))]
    seen = [each["key"] for each in coordinator.entries("invites")]
    key = _key_of(named, {*made, *seen})
    coordinator.order("revoke", key, reason)
    print(f"the invite {key} is revoked: no more keys come with it; those that did stay")
    return 0


def invite_rows(made: list[Made], seen: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each invite: those made here, then others that the ledger knows.

    Args:
        made: on this machine.
        seen: the coordinator's list of invites.

    Returns:
        key, pool (null: any untrusted), uses (null where it was made elsewhere), used, expires
        (seconds since the epoch, or null), revoked (why, or null).
    """
    known = {each["key"]: each for each in seen}
    rows = [
        {**asdict(each), "used": 0, "revoked": None, **known.pop(each.key, {})} for each in made
    ]
    return rows + [{"pool": None, "uses": None, "expires": None, **each} for each in known.values()]


def invite_table(rows: list[dict[str, Any]]) -> Table:
    """Return the rows of `invite_rows` as a table."""
    table = plain_table("invite", "pool", "used", "expires", "state")
    for row in rows:
        at = row["expires"]
        expires = "" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
        most = "?" if row["uses"] is None else row["uses"]
        table.add_row(
            row["key"][:16], row["pool"] or "any", f"{row['used']} of {most}", expires, _state(row)
        )
    return table


def read_made(run_dir: Path) -> list[Made]:
    """Read the invites that `invite_command` recorded, without damaged lines."""
    try:
        lines = (run_dir / MADE_FILE).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(Made(**parse_object(line, max_bytes=_MAX_LINE_BYTES)))
        except (MalformedJson, TypeError):
            continue
    return found


def _note(run_dir: Path, made: Made) -> None:
    try:
        with (run_dir / MADE_FILE).open("ab") as file:
            file.write(canonical_json(asdict(made)) + b"\n")
    except OSError as error:
        raise UserError(
            f"the invite cannot be noted down: {error.strerror or error}",
            place=str(run_dir / MADE_FILE),
            remedy="free disk space or mend the permissions, then invite again",
        ) from error


def _state(row: dict[str, Any]) -> str:
    if row["revoked"] is not None:
        return f"revoked: {row['revoked']}"
    if row["expires"] is not None and time.time() > row["expires"]:
        return "expired"
    return "used up" if row["uses"] is not None and row["used"] >= row["uses"] else "open"


def _key_of(named: str, known: set[str]) -> str:
    if is_digest(named):
        return named
    if "#" in named:
        text = parse_join_link(named).invite
        try:
            return invite_key(text or "")
        except BadSignature as error:
            raise UserError(
                str(error), place="--revoke", remedy="copy the whole link of the invite"
            ) from error
    return key_by_prefix(named, known, "--revoke", "one that --list shows, or its link")
