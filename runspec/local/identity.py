"""Keys of a run on one machine, and accounts of the people who may use its served model.

The keys are a throw-away root, a key a role, and the roles.json that the root signs.

An account has a name, a password, keys, and tokens of a day. Accounts are in `accounts.db` of the
run's directory, of which only digests of keys and scrypt hashes of passwords are stored. The
operator's commands and the server may write at the same time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError, reported
from runspec.core.files import read_bounded, write_atomic
from runspec.core.process import root_public_key
from runspec.core.roles import (
    MAX_BYTES,
    OWN_WORKERS_FILE,
    Roles,
    open_roles,
    read_own_workers,
    sign_roles,
)
from runspec.core.schema import RunSpec, role_names
from runspec.core.schema.role_names import island_names
from runspec.core.signed import BadSignature, SigningKey

YEAR_S = 365 * 86400.0
_SHORTEST_S = 86400.0


@dataclass(frozen=True)
class Identity:
    """The keys of a run; all files lie in `folder`."""

    folder: Path
    root_public_key: str

    @property
    def roles_file(self) -> Path:
        return self.folder / "roles.json"

    def key(self, role: str) -> Path:
        """The private key of a role: publisher, coordinator, validator-<i>, <pool>-<i>, or
        island-<name>."""
        return self.folder / f"{role}.key"


def make_identity(
    run_dir: Path, spec: RunSpec, *, now: Callable[[], float] = time.time
) -> Identity:
    """Makes the keys that are missing, and signs roles.json where it is missing or half expired.

    Validators that the spec asks for no more stay in it, for what they signed. The public keys of
    the run's own workers are kept too; one whose private key lies elsewhere was named by a bundle.

    A spec that pins a root brings its own keys: the publisher's, the coordinator's, the validators'
    and the islands', and the roles.json in which that root names them. Workers' keys are always
    made.

    Raises:
        UserError: the pinned root's files are missing or not its own.
    """
    folder = run_dir / "keys"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    pinned = spec.identity.root_public_key
    if pinned is not None:
        if (problem := pinned_root_problem(run_dir, spec)) is not None:
            raise problem
        identity = Identity(folder, pinned)
    else:
        root = _key(folder / "root.key")
        identity = Identity(folder, root.public_hex)
        _sign_roles(identity, spec, root, now())
    known, away = read_own_workers(folder), role_names.elsewhere(spec)
    own = dict(known)
    for name in role_names.worker_names(spec):
        if name not in away or name not in known:
            own[name] = _key(identity.key(name)).public_hex
    if own != known:
        write_atomic(folder / OWN_WORKERS_FILE, canonical_json(own))
    return identity


def _sign_roles(identity: Identity, spec: RunSpec, root: SigningKey, now: float) -> None:
    """Makes the keys of a run with a throw-away root, and signs roles.json where need be."""

    def keys(names: Iterable[str]) -> list[str]:
        return [_key(identity.key(name)).public_hex for name in names]

    held = {office: keys(names) for office, names in _offices(spec).items()}
    # The verdicts of all validators that the run ever had outlive them.
    had = sorted(path.stem for path in identity.folder.glob("validator-*.key"))
    ours = [name for name in had if name.removeprefix("validator-").isdecimal()]
    held["validator"] = [*dict.fromkeys([*held["validator"], *keys(ours)])]
    names = island_names(spec)
    islands = dict(zip(names, keys(map(role_names.island_role, names)), strict=True))
    hours = spec.budget.max_hours
    valid_s = YEAR_S if hours is None else max(_SHORTEST_S, hours * 3600.0)
    with suppress(OSError, UserError, BadSignature):
        roles = _read_roles(identity.folder, identity.root_public_key, spec, now)
        same = all(frozenset(public) == getattr(roles, name) for name, public in held.items())
        if same and roles.islands == islands and roles.expires >= now + valid_s / 2:
            return
    signed = sign_roles(spec.name, held, root, valid_s=valid_s, now=now, islands=islands)
    write_atomic(identity.roles_file, signed)


def _offices(spec: RunSpec) -> dict[str, list[str]]:
    """Return the processes whose keys roles.json names, by office."""
    found = {name: [name] for name in ("publisher", "coordinator")}
    found["validator"] = list(role_names.validator_names(spec))
    if evaluators := role_names.evaluator_names(spec):
        found["evaluator"] = list(evaluators)
    return found


def pinned_root_problem(run_dir: Path, spec: RunSpec) -> UserError | None:
    """Return what a run with a pinned root lacks to start here; None where it lacks nothing."""
    pinned = spec.identity.root_public_key
    if pinned is None:
        return None
    folder = run_dir / "keys"
    try:
        roles = _read_roles(folder, pinned, spec)
    except (OSError, UserError, BadSignature) as error:
        return UserError(
            f"no roles.json signed by this root: {error}",
            place="identity.root_public_key",
            remedy=f"make the folder {folder}, and put roles.json and the keys that it names "
            "there; or leave the root out, and `runspec prepare` makes and pins one",
        )
    away, offices = role_names.elsewhere(spec), _offices(spec).items()
    wanted = {
        name: getattr(roles, office)
        for office, names in offices
        for name in names
        if name not in away
    }
    for name in island_names(spec):
        if role_names.shares_name(name) not in away:
            wanted[role_names.island_role(name)] = frozenset({roles.islands.get(name, "")})
    for role, allowed in wanted.items():
        try:
            key = SigningKey.load(folder / f"{role}.key")
        except UserError as error:
            return error
        if key.public_hex not in allowed:
            return UserError(
                f"roles.json does not name this key as {role}",
                place=str(folder / f"{role}.key"),
                remedy="sign a roles.json that does, or bring the right key",
            )
    return None


def load_roles(run_dir: Path, spec: RunSpec) -> Roles:
    """Reads the roles.json of a run.

    Raises:
        UserError: it is missing, or its root did not sign it.
    """
    folder, remedy = run_dir / "keys", "start the run with `runspec apply`"
    with reported("cannot be believed", folder / "roles.json", remedy, OSError, BadSignature):
        return _read_roles(folder, root_public_key(run_dir, spec), spec)


def _read_roles(folder: Path, root: str, spec: RunSpec, now: float | None = None) -> Roles:
    data = read_bounded(folder / "roles.json", MAX_BYTES)
    return open_roles(data, root_public_key=root, run=spec.name, now=now)


def _key(path: Path) -> SigningKey:
    """The key in a file, made on first use."""
    if not path.exists():
        SigningKey.generate().save(path)
    return SigningKey.load(path)


ACCOUNTS_FILE = "accounts.db"
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{1,31}")
PASSWORD = range(10, 201)
"""Characters of a password."""
MOST_ACCOUNTS = 1000
"""Accounts of a run."""
_KEYS = 8
"""Keys of an account; a further one replaces the oldest."""
_DAY_S = 86_400
_BUSY_S = 5.0
_TABLES = """
CREATE TABLE IF NOT EXISTS accounts(name TEXT PRIMARY KEY, salt BLOB NOT NULL, hash BLOB NOT NULL,
  revoked INTEGER NOT NULL DEFAULT 0, day INTEGER NOT NULL DEFAULT 0,
  tokens INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS keys(digest BLOB PRIMARY KEY, name TEXT NOT NULL);
"""


class Refused(Exception):
    """No account can be made like this; the text says why."""


class Accounts:
    """The accounts of a run; every call is a transaction of its own.

    Args:
        path: of the database, which is made where it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        with self._opened() as database:
            database.executescript(_TABLES)

    @contextmanager
    def _opened(self) -> Iterator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._path, timeout=_BUSY_S)) as database, database:
                yield database
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"the accounts cannot be read or written: {error}",
                place=str(self._path),
                remedy="free the disk; if the file is damaged, remove it, and all register again",
            ) from error

    def register(self, name: str, password: str) -> str:
        """Make an account, and return its first key.

        Raises:
            Refused: the name or the password will not do, or the name is taken.
        """
        if not NAME.fullmatch(name):
            raise Refused("a name has 2 to 32 of a-z, 0-9, - and _; a letter or a digit is first")
        if len(password) not in PASSWORD:
            raise Refused(f"a password has {PASSWORD.start} to {PASSWORD.stop - 1} characters")
        salt = secrets.token_bytes(16)
        row = (name, salt, _hash(password, salt))
        with self._opened() as database:
            [count] = database.execute("SELECT count(*) FROM accounts").fetchone()
            if count >= MOST_ACCOUNTS:
                raise Refused(f"there are {MOST_ACCOUNTS} accounts, which is the most")
            sql = "INSERT OR IGNORE INTO accounts(name, salt, hash) VALUES (?, ?, ?)"
            if not database.execute(sql, row).rowcount:
                raise Refused("the name is taken")
            return _new_key(database, name)

    def login(self, name: str, password: str) -> str | None:
        """Return a new key; None if there is no such account, it is revoked, or the password is
        another one. Each of these takes the same time."""
        with self._opened() as database:
            sql = "SELECT salt, hash FROM accounts WHERE name = ? AND NOT revoked"
            found = database.execute(sql, (name,)).fetchone()
        salt, expected = found or (bytes(16), bytes(64))
        if not hmac.compare_digest(_hash(password, salt), expected) or found is None:
            return None
        with self._opened() as database:
            return _new_key(database, name)

    def owner(self, key: str) -> str | None:
        """Return the name of the account that a key belongs to."""
        with self._opened() as database:
            sql = "SELECT name FROM keys JOIN accounts USING (name) WHERE digest = ?"
            found = database.execute(f"{sql} AND NOT revoked", (_digest(key),)).fetchone()
        return None if found is None else str(found[0])

    def spend(self, name: str, tokens: int) -> int:
        """Add to the tokens of an account's day, and return them."""
        day = int(time.time()) // _DAY_S
        with self._opened() as database:
            sql = "UPDATE accounts SET tokens = ? + (day = ?) * tokens, day = ? WHERE name = ?"
            found = database.execute(f"{sql} RETURNING tokens", (tokens, day, day, name))
            return sum(row[0] for row in found.fetchall())

    def revoke(self, name: str) -> bool:
        """End an account for good, keys included; return whether there was one."""
        with self._opened() as database:
            sql = "UPDATE accounts SET revoked = 1 WHERE name = ?"
            return database.execute(sql, (name,)).rowcount > 0

    def all(self) -> list[tuple[str, bool, int]]:
        """Return name, whether it is revoked, and tokens of this day (UTC) of each account."""
        with self._opened() as database:
            sql = "SELECT name, revoked, (day = ?) * tokens FROM accounts ORDER BY name"
            return database.execute(sql, (int(time.time()) // _DAY_S,)).fetchall()


def _new_key(database: sqlite3.Connection, name: str) -> str:
    key = secrets.token_urlsafe(24)
    database.execute("INSERT INTO keys VALUES (?, ?)", (_digest(key), name))
    newest = "SELECT rowid FROM keys WHERE name = ? ORDER BY rowid DESC LIMIT ?"
    sql = f"DELETE FROM keys WHERE name = ? AND rowid NOT IN ({newest})"  # noqa: S608 - no input
    database.execute(sql, (name, name, _KEYS))
    return key


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def _hash(password: str, salt: bytes) -> bytes:
    data = password.encode(errors="surrogatepass")
    return hashlib.scrypt(data, salt=salt, n=2**14, r=8, p=1)
