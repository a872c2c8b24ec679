"""Accounts of people who may use a served model: names, passwords, keys, tokens of a day.

They are in `accounts.db` of the run's directory, of which only digests of keys and scrypt hashes of
passwords are stored. The operator's commands and the server may write at the same time.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from runspec.core.errors import UserError

FILE = "accounts.db"
NAME = re.compile(r"[a-z0-9][a-z0-9_-]{1,31}")
PASSWORD = range(10, 201)
"""Characters of a password."""
MOST = 1000
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
            if count >= MOST:
                raise Refused(f"there are {MOST} accounts, which is the most")
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
