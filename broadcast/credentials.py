"""Secrets that a server reads from files: client tokens and its TLS certificate, with reloading."""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import secrets
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Generic, TypeVar

from broadcast.disk import Identity, identity
from runspec.core.errors import UserError
from runspec.core.files import read_bounded

Value = TypeVar("Value")
MAX_TOKENS_BYTES = 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
_SCHEME = "bearer "


class Reloaded(Generic[Value]):
    """A value read from files, and read again when one of them changes.

    If the files can no longer be read, the last value stays in use and one error is logged.

    Args:
        read: called as `read(*paths, log)`, returns the value.
        paths: the files.
        log: receives the UserErrors of `read` when files have changed.

    Raises:
        UserError: the first `read` failed.
    """

    def __init__(self, read: Callable[..., Value], *paths: Path, log: logging.Logger) -> None:
        self._paths, self._log = paths, log
        self._read = functools.partial(read, *paths, log)
        self._seen = self._identities()
        self._value = self._read()

    def get(self) -> Value:
        """Return the current value; costs one stat of each file if none has changed."""
        seen = self._identities()
        if seen != self._seen:
            self._seen = seen
            try:
                self._value = self._read()
                self._log.info("read again: %s", ", ".join(map(str, self._paths)))
            except UserError as error:
                self._log.error("what was read before stays in use: %s", error)
        return self._value

    def _identities(self) -> list[Identity | None]:
        return [identity(path) for path in self._paths]


def warn_if_open(path: Path, log: logging.Logger) -> None:
    """Warn if every user of the machine may read a secret."""
    if path.stat().st_mode & 0o004:
        log.warning("%s: every user of this machine may read it; `chmod 600` it", path)


def server_context(cert: Path, key: Path, log: logging.Logger) -> ssl.SSLContext:
    """Return a server context for TLS 1.2 or newer from a certificate chain and its key (PEM).

    Raises:
        UserError: a file cannot be read, holds no certificate or key, or the two do not match.
    """
    for path in (cert, key):
        try:
            path.open("rb").close()
        except OSError as error:
            raise UserError(f"cannot read: {error.strerror}", place=str(path)) from error
    warn_if_open(key, log)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    try:
        # With no passphrase OpenSSL would ask for one at the terminal and wait.
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise UserError(
                f"is not the key of {cert}", place=str(key), remedy="give the pair that belongs"
            ) from error
        raise UserError(
            f"no certificate chain and key without a passphrase, as PEM: {error}",
            place=f"{cert}, {key}",
        ) from error
    return context


class Tokens:
    """Client names by token.

    A token is looked up by a hash with a key of this process alone, so that the time of a look-up
    reveals nothing about the tokens.

    Args:
        names: the client name of each token; a client may have several tokens.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._key = secrets.token_bytes(32)
        self._names = {self._hash(token): name for token, name in names.items()}

    def name_of(self, authorization: str | None) -> str | None:
        """Return the client that an `Authorization` header authenticates; None if it does not."""
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            return None
        return self._names.get(self._hash(authorization[len(_SCHEME) :].strip()))

    def _hash(self, token: str) -> bytes:
        return hashlib.blake2b(token.encode(errors="replace"), key=self._key).digest()


def read_tokens(path: Path, log: logging.Logger) -> Tokens:
    """Read a tokens file: one `NAME TOKEN` a line. Empty lines and lines with # are ignored.

    Raises:
        UserError: unreadable, too large, or a malformed line (whose token is not shown).
    """
    try:
        text = read_bounded(path, MAX_TOKENS_BYTES).decode()
        warn_if_open(path, log)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the tokens: {error}", place=str(path)) from error
    names: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        place = f"{path}:{number}"
        if len(words) != 2 or not _NAME.fullmatch(words[0]) or not _TOKEN.fullmatch(words[1]):
            raise UserError(
                "not `NAME TOKEN` with a token of 16 to 512 letters, digits and ._~+/=-",
                place=place,
                remedy="make tokens with `openssl rand -hex 32`",
            )
        if names.setdefault(words[1], words[0]) != words[0]:
            raise UserError("this token has another name already", place=place)
    return Tokens(names)
