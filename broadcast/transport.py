"""One bounded HTTP GET from a server that may be down, slow or lying."""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from runspec.core import http_client
from runspec.core.address import is_server_url
from runspec.core.errors import UserError
from runspec.core.files import read_bounded
from runspec.core.http_client import LateAnswer, NoAnswer, fetch

_READ_BUFFER = 1024 * 1024
_PRINTABLE = re.compile(r"[!-~]+")
_SECONDS = re.compile(r"[0-9]{1,9}")


class Fault(Exception):
    """An answer that cannot be used: unreachable, an error status, too slow."""


class NotThere(Fault):
    """The server answered that it has no such thing (404): no fault of its own."""


class Busy(Fault):
    """The server asks for patience (429): no fault of its own."""

    def __init__(self, retry_after_s: float | None) -> None:
        super().__init__("too many requests (429)")
        self.retry_after_s = retry_after_s
        """How long, as far as it said so; not to be believed beyond reason."""


class TooSlow(Fault):
    """So slow that asking another server is the better bet."""


class Lie(Fault):
    """An answer that failed its check: the wrong bytes, signature, run or version."""


@dataclass(frozen=True)
class Access:
    """How servers are spoken to: what we show them, and by whom they must be vouched for.

    Raises:
        UserError: the token cannot stand in a header (it is not shown).
    """

    token: str | None = field(default=None, repr=False)
    """Bearer token for every server that is named; None: none is needed."""
    ca_file: Path | None = None
    """Certificates (PEM) that https servers must chain to; None: those that the system trusts."""

    def __post_init__(self) -> None:
        if self.token is not None and _PRINTABLE.fullmatch(self.token) is None:
            raise UserError("a token is made of printable ASCII characters without spaces")

    @classmethod
    def read(cls, token_file: Path | None, ca_file: Path | None) -> Access:
        """With the token in a file, surrounding white space aside.

        Raises:
            UserError: the file cannot be read or holds no token.
        """
        if token_file is None:
            return cls(None, ca_file)
        try:
            return cls(read_bounded(token_file, 4096).decode("ascii").strip(), ca_file)
        except (OSError, UnicodeDecodeError, UserError) as error:
            raise UserError(
                f"holds no token: {error}", place=str(token_file), remedy="one token, nothing else"
            ) from error

    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    @cached_property
    def ssl_context(self) -> ssl.SSLContext:
        """Checks certificate and host name.

        Raises:
            UserError: `ca_file` cannot be read or holds no certificate.
        """
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise UserError(
                f"no certificates: {error}", place=str(self.ca_file), remedy="PEM is expected"
            ) from error


def new_session(access: Access) -> aiohttp.ClientSession:
    """Returns connections to servers that `access` opens; no proxy of the environment is used."""
    return http_client.new_session(
        tls=access.ssl_context, headers=access.headers(), read_bufsize=_READ_BUFFER
    )


def base_url(text: str) -> str:
    """A server's base URL without a trailing slash.

    Raises:
        UserError: not http(s)://host[:port][/prefix].
    """
    if not is_server_url(text):
        raise UserError(
            f"{text!r} is not the URL of an origin or relay",
            remedy="write for example http://127.0.0.1:8080",
        )
    if urlsplit(text).username is not None:
        raise UserError(
            "a server's URL with a user's name in it, which would end up in logs",
            remedy="give a token in a file instead",
        )
    return text.rstrip("/")


def refusal(status: int, retry_after: str) -> Fault:
    """What an answer other than 200 means; `retry_after` is its header, or empty."""
    if status == 404:
        return NotThere("not there (404)")
    if status == 429:  # the header may hold a date, too: then we wait as long as without it
        return Busy(float(retry_after) if _SECONDS.fullmatch(retry_after) else None)
    why = {401: ": no token, or not one of its own", 403: ": not for this token"}
    return Fault(f"status {status}{why.get(status, '')}")


async def get(
    session: aiohttp.ClientSession, url: str, *, max_bytes: int, timeout_s: float
) -> bytes:
    """The body of a GET.

    Args:
        session: of `new_session`.
        url: what to get. Redirects are not followed: a relay cannot send us elsewhere.
        max_bytes: a longer body is refused as soon as it shows.
        timeout_s: for all of it, so that an endless drip ends too.

    Raises:
        NotThere: status 404.
        Busy: status 429.
        TooSlow: it was not here in time.
        Fault: anything else that is not 200 with such a body.
    """
    with faults():
        answer = await fetch(session, "GET", url, max_bytes=max_bytes, timeout_s=timeout_s)
    if answer.status != 200:
        raise refusal(answer.status, answer.retry_after)
    return answer.content


@contextmanager
def faults() -> Iterator[None]:
    """Raises a `Fault` of the server instead of the errors of `runspec.core.http_client`."""
    try:
        yield
    except LateAnswer as error:
        raise TooSlow(str(error)) from error
    except NoAnswer as error:
        raise Fault(str(error)) from error
