"""Who asks: a bearer token's name where the server has a list of tokens, else the address."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import re
import secrets
from collections.abc import Mapping
from pathlib import Path

from broadcast.reloaded import warn_if_open
from runspec.core.errors import UserError
from runspec.core.files import read_bounded

MAX_TOKENS_BYTES = 1024 * 1024
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")
_SCHEME = "bearer "


class Tokens:
    """Names by token. A token is looked up by a hash with a key of this process alone, so that the
    time of a look-up tells nothing of the tokens.

    Args:
        names: for each token the name of its client; one may have several, as while they change.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._key = secrets.token_bytes(32)
        self._names = {self._hash(token): name for token, name in names.items()}

    def name_of(self, authorization: str | None) -> str | None:
        """The client that an `Authorization` header proves; None for any other header."""
        if authorization is None or not authorization.lower().startswith(_SCHEME):
            return None
        return self._names.get(self._hash(authorization[len(_SCHEME) :].strip()))

    def _hash(self, token: str) -> bytes:
        return hashlib.blake2b(token.encode(errors="replace"), key=self._key).digest()


def read_tokens(path: Path, log: logging.Logger) -> Tokens:
    """Reads a tokens file: a line `NAME TOKEN` each; empty lines and those with # say nothing.

    Raises:
        UserError: unreadable, too large, or a line of another form (whose token is not shown).
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


def address_of(peer: object) -> str:
    """What limits go by without tokens: an IPv4 address, of IPv6 the first 64 bits (one customer).

    Args:
        peer: a socket's peer name.
    """
    if not isinstance(peer, tuple) or not peer:
        return "unknown"
    try:
        address = ipaddress.ip_address(str(peer[0]).partition("%")[0])
    except ValueError:
        return "unknown"
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return f"{ipaddress.ip_network((address, 64), strict=False).network_address}/64"
