"""`runspec workers`, `ban`, `unban`, `invite`: who works for a run, and what the operator decides.

The operator reaches the coordinator over HTTP, or its ledger while the run is stopped.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer
from rich.table import Table

from runspec import cli
from runspec.core.address import parse_join_link
from runspec.core.canonical import MalformedJson, canonical_json, is_digest, parse_object
from runspec.core.errors import UserError, one_line, reported
from runspec.core.process import load_endpoints
from runspec.core.roles import invite_key, make_invite
from runspec.core.schema.load import load_resolved
from runspec.core.signed import BadSignature, SigningKey
from runspec.local.endpoints import run_link
from runspec.local.identity import load_roles
from runspec.local.run_dir import find_run, hold, holder

Key = Annotated[str, typer.Argument(metavar="KEY", help="A public key, or how it begins.")]
Reason = Annotated[str, typer.Option("--reason", help="Why; the key's holder is told.")]
REQUEST_TIMEOUT_S = 10.0
_MAX_PAGE_BYTES = 4 * 1024 * 1024
_MAX_REASON = 1000
LEAST_PREFIX = 8
"""Characters of a key that are enough to name it."""
_SOURCES = {name: name for name in ("key", "pool", "standing", "reputation", "prefill_share")}
_SOURCES |= {"credits": "accepted_tokens", "accepted": "accepted_submissions"}
_SOURCES |= {"rejected": "rejected_submissions", "withheld": "withheld_leases"}
_SOURCES |= {name: name for name in ("alive", "reason")}
"""Column of `runspec workers`, and its key in the coordinator's list."""
_NEVER_REGISTERED: dict[str, Any] = {**dict.fromkeys(_SOURCES, 0), "pool": None, "alive": False}
_NEVER_REGISTERED |= {"standing": "banned", "reputation": 0.0, "prefill_share": 1.0}


@dataclass(frozen=True)
class CoordinatorAccess:
    """An operator's access to a coordinator: reads its lists and gives it orders."""

    page: Callable[[str, str], dict[str, Any]]
    """A page of a list, as `GET /v1/lists/NAME/AFTER` has it; an empty `AFTER` is the first.

    Raises:
        UserError: it cannot be read.
    """
    order: Callable[[str, dict[str, str]], object]
    """Bans or unbans a key, or revokes an invite: verb, and `key` with `reason`.

    Raises:
        UserError: it cannot be done, or is refused; the message is the coordinator's own.
    """

    def entries(self, name: str) -> list[dict[str, Any]]:
        """All entries of a list: `workers`, `banned` or `invites`.

        Raises:
            UserError: they cannot be read.
        """
        found: list[dict[str, Any]] = []
        after: str | None = ""
        while after is not None:
            page = self.page(name, after)
            found += page[name]
            after = page["next"]
        return found


def key_by_prefix(named: str, known: set[str], place: str, of: str) -> str:
    """Return the one known key that begins with `named`.

    Raises:
        UserError: none does, several do, or `named` is too short; `place` and `of` say of what.
    """
    found = [key for key in known if key.startswith(named)]
    if len(named) < LEAST_PREFIX or len(found) != 1:
        raise UserError(
            f"{len(found)} known keys begin with it",
            place=f"{place} {named[:80]!r}",
            remedy=f"give {LEAST_PREFIX} characters or more of {of}",
        )
    return found[0]


def coordinator_of(run: str, runs_dir: Path) -> CoordinatorAccess:
    """Return the access to the coordinator of a run whose directory is on this machine.

    A running one is asked with its own key; of a run that is not alive the ledger is.

    Raises:
        UserError: there is no such run, or it has never been started.
    """
    from verify.coordinator.handlers.operator import order_stopped
    from verify.coordinator.handlers.workers import page, read_state
    from verify.coordinator_http import CoordinatorHttp

    run_dir = find_run(run, runs_dir)
    spec = load_resolved(run_dir)
    if holder(run_dir) is None:
        state = cache(lambda: read_state(run_dir, spec))

        def write(verb: str, body: dict[str, str]) -> None:
            with hold(run_dir):
                order_stopped(run_dir, spec, load_roles(run_dir, spec), verb, body)

        return CoordinatorAccess(lambda name, after: page(name, after, state()), write)
    endpoints = load_endpoints(run_dir)
    if endpoints is None:
        raise UserError(
            "has no coordinator yet", place=str(run_dir), remedy="start it with `runspec apply`"
        )
    parts = urlsplit(endpoints.coordinator)
    # Loopback where the coordinator listens on all addresses.
    here = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(parts.hostname or "")  # noqa: S104
    http = CoordinatorHttp(
        f"{parts.scheme}://{here}:{parts.port}" if here else endpoints.coordinator,
        SigningKey.load(run_dir / "keys" / "coordinator.key"),
        run=spec.name,
        deadline_s=REQUEST_TIMEOUT_S,
    )

    def ask(name: str, after: str) -> dict[str, Any]:
        path = f"/v1/lists/{name}/{after}".rstrip("/")
        answer = http.call("GET", path, max_bytes=_MAX_PAGE_BYTES)
        try:
            return parse_object(answer.content, max_bytes=_MAX_PAGE_BYTES)
        except MalformedJson as error:
            raise http.not_believed(error) from error

    return CoordinatorAccess(
        ask, lambda verb, body: http.call("POST", f"/v1/operator/{verb}", body=canonical_json(body))
    )


def workers_command(
    run: cli.Run, as_json: cli.Json = False, runs_dir: cli.RunsDir = cli.RUNS
) -> int:
    """Lists the workers, those with the most credit first; returns the exit code."""
    coordinator = coordinator_of(run, runs_dir)
    rows = worker_rows(coordinator.entries("workers"), coordinator.entries("banned"))
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        show_workers(rows)
        if any(row["standing"] == "banned" for row in rows):
            print(f"an appeal is granted with: runspec unban {run} KEY --reason WHY")
    else:
        print("no worker has registered")
    return 0


def worker_rows(
    workers: Sequence[dict[str, Any]], banned: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return a row for each key.

    Args:
        workers, banned: lists of the coordinator.

    Returns:
        By credit: key, pool (null for a banned key that never registered), standing, reputation in
        [0, 1], prefill_share, credits (accepted output tokens), accepted, rejected, withheld,
        alive, reason.
    """
    rows = [{name: worker[source] for name, source in _SOURCES.items()} for worker in workers]
    rows.sort(key=lambda row: (-row["credits"], row["key"]))
    registered = {row["key"] for row in rows}
    return rows + [
        {**_NEVER_REGISTERED, **each} for each in banned if each["key"] not in registered
    ]


def show_workers(rows: list[dict[str, Any]]) -> None:
    """Print the rows of `worker_rows`, the reputation beside the standing, reasons below."""
    answers = "accepted, rejected, withheld"
    columns = ("key", "pool", "standing", "recomputed", "credits", answers, "alive")
    table = cli.plain_table(*columns)
    for row in rows:
        table.add_row(
            *(row["key"][:LEAST_PREFIX], row["pool"] or ""),
            f"{row['standing']} {row['reputation']:.2f}",
            *(f"{row['prefill_share']:.0%}", f"{row['credits']:,}"),
            ", ".join(str(row[name]) for name in answers.split(", ")),
            "yes" if row["alive"] else "no",
        )
    console = cli.console()
    console.print(table)
    for row in rows:
        if row["reason"]:
            reason = one_line(row["reason"], _MAX_REASON)
            console.print(f"{row['key'][:LEAST_PREFIX]}: {reason}")


def ban_command(run: cli.Run, key: Key, reason: Reason, runs_dir: cli.RunsDir = cli.RUNS) -> int:
    """Bans a key; returns the exit code."""
    whole = _order("ban", run, key, reason, runs_dir)
    print(f"{whole} is banned: its requests are refused, and its open leases are over")
    return 0


def unban_command(run: cli.Run, key: Key, reason: Reason, runs_dir: cli.RunsDir = cli.RUNS) -> int:
    """Lifts a ban; returns the exit code."""
    whole = _order("unban", run, key, reason, runs_dir)
    print(f"{whole} may work again; all its work is recomputed until enough was accepted")
    return 0


def _order(verb: str, run: str, key: str, reason: str, runs_dir: Path) -> str:
    """Gives an order about a key, named by its 64 hex characters or by the first eight and more of
    one that is known; returns the whole key."""
    coordinator, whole = coordinator_of(run, runs_dir), key
    if not is_digest(key):
        known = {e["key"] for name in ("workers", "banned") for e in coordinator.entries(name)}
        whole = key_by_prefix(key, known, "KEY", "one that `runspec workers` lists, or all 64")
    coordinator.order(verb, {"key": whole, "reason": reason})
    return whole


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


def invite_command(
    run: cli.Run,
    pool: Annotated[
        str | None, typer.Option("--pool", help="For one pool only.", show_default="any")
    ] = None,
    uses: Annotated[
        int, typer.Option("--uses", min=1, max=1_000_000, help="Keys that may come with it.")
    ] = 1,
    expires: Annotated[
        float,
        typer.Option(parser=cli.duration, metavar="TIME", help="For how long.", show_default="7d"),
    ] = 7 * 86400.0,
    listed: Annotated[
        bool, typer.Option("--list", help="Lists the invites instead; the run must be up.")
    ] = False,
    revoke: Annotated[
        str | None,
        typer.Option(
            "--revoke",
            metavar="INVITE",
            help="Revokes one instead: its link, its key, or how that begins.",
            show_default=False,
        ),
    ] = None,
    reason: Annotated[
        str, typer.Option("--reason", help="Why it is revoked; who comes with it is told.")
    ] = "the link is no longer valid",
    as_json: Annotated[bool, typer.Option("--json", help="With --list, for programs.")] = False,
    runs_dir: cli.RunsDir = cli.RUNS,
) -> int:
    """Prints a link, for which the run need not be alive, or does what the options say; returns the
    exit code."""
    if revoke is not None:
        return revoke_invite(run, revoke, reason, runs_dir)
    if listed:
        return list_invites(run, as_json, runs_dir)
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
        valid_s=expires,
        coordinator=SigningKey.load(run_dir / "keys" / "coordinator.key"),
    )
    made = Made(invite_key(text), pool, uses, time.time() + expires)
    path, remedy = run_dir / MADE_FILE, "free disk space or mend the permissions, then invite again"
    thing = "the invite cannot be noted"
    with reported(thing, path, remedy, OSError), path.open("ab") as file:
        file.write(canonical_json(asdict(made)) + b"\n")
    print(replace(link, invite=text))
    return 0


def list_invites(run: str, as_json: bool, runs_dir: Path) -> int:
    """Lists the invites of a run that is up, with their uses; returns the exit code."""
    coordinator = coordinator_of(run, runs_dir)
    rows = invite_rows(read_made(find_run(run, runs_dir)), coordinator.entries("invites"))
    if as_json:
        print(json.dumps(rows, indent=2))
    elif rows:
        cli.console().print(invite_table(rows))
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
    if "#" in named:
        try:
            named = invite_key(parse_join_link(named).invite or "")
        except BadSignature as error:
            remedy = "copy the whole link of the invite"
            raise UserError(str(error), place="--revoke", remedy=remedy) from error
    more = "one that --list shows, or its link"
    key = named if is_digest(named) else key_by_prefix(named, {*made, *seen}, "--revoke", more)
    coordinator.order("revoke", {"key": key, "reason": reason})
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
    table = cli.plain_table("invite", "pool", "used", "expires", "state")
    for row in rows:
        at = row["expires"]
        expires = "" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
        most = "?" if row["uses"] is None else row["uses"]
        state = "used up" if row["uses"] is not None and row["used"] >= row["uses"] else "open"
        if row["revoked"] is not None:
            state = f"revoked: {row['revoked']}"
        elif at is not None and time.time() > at:
            state = "expired"
        pool, used = row["pool"] or "any", f"{row['used']} of {most}"
        table.add_row(row["key"][:16], pool, used, expires, state)
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
