"""HTTP GET with limits, for servers that may be down, slow or dishonest."""

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
from runspec.core.http_client import Answer, LateAnswer, NoAnswer, fetch

_READ_BUFFER = 1024 * 1024
_PRINTABLE = re.compile(r"[!-~]+")


class Fault(Exception):
    """An answer that cannot be used: unreachable, an error status, too slow."""


class NotThere(Fault):
    """The server has no such file (404). This does not count against the server."""


class Busy(Fault):
    """The server refuses too many requests (429). This does not count against the server."""

    def __init__(self, retry_after_s: float | None) -> None:
        super().__init__("too many requests (429)")
        self.retry_after_s = retry_after_s
        """Seconds that Retry-After names, unchecked; None if it names none."""


class TooSlow(Fault):
    """The server is so slow that another one is expected to be faster."""


class Lie(Fault):
    """An answer that failed its check: the wrong bytes, signature, run or version."""


@dataclass(frozen=True)
class Access:
    """Token and certificates for requests to servers.

    Raises:
        UserError: the token is not valid in a header (the message does not show it).
    """

    token: str | None = field(default=None, repr=False)
    """Bearer token that is sent to every server; None: no token."""
    ca_file: Path | None = None
    """Root certificates (PEM) for https servers; None: those that the system trusts."""

    def __post_init__(self) -> None:
        if self.token is not None and _PRINTABLE.fullmatch(self.token) is None:
            raise UserError("a token is made of printable ASCII characters without spaces")

    @classmethod
    def read(cls, token_file: Path | None, ca_file: Path | None) -> Access:
        """Read the token from a file, without surrounding white space.

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
        """Return the headers of every request."""
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    @cached_property
    def ssl_context(self) -> ssl.SSLContext:
        """Context that checks certificate and host name.

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
    """Return a session with this access; it uses no proxy of the environment."""
    return http_client.new_session(
        tls=access.ssl_context, headers=access.headers(), read_bufsize=_READ_BUFFER
    )


def base_url(text: str) -> str:
    """Return a server's base URL without a trailing slash.

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
            "a server's URL has a user's name in it, which logs would show",
            remedy="give a token in a file instead",
        )
    return text.rstrip("/")


def refusal(answer: Answer) -> Fault:
    """Return the fault of an answer other than 200."""
    if answer.status == 404:
        return NotThere("not there (404)")
    if answer.status == 429:
        return Busy(answer.busy_s)
    why = {401: ": no token, or not one of its own", 403: ": not for this token"}
    return Fault(f"status {answer.status}{why.get(answer.status, '')}")


async def get(
    session: aiohttp.ClientSession, url: str, *, max_bytes: int, timeout_s: float
) -> bytes:
    """Return the body of a GET.

    Args:
        session: from `new_session`.
        url: the URL. Redirects are not followed, so that a relay cannot redirect us.
        max_bytes: limit of the body; a longer one is refused as soon as it is noticed.
        timeout_s: limit of the whole request, so that a server cannot send slowly for ever.

    Raises:
        NotThere: status 404.
        Busy: status 429.
        TooSlow: not complete in time.
        Fault: any other status than 200, a body that is too long, or no connection.
    """
    with faults():
        answer = await fetch(session, "GET", url, max_bytes=max_bytes, timeout_s=timeout_s)
    if answer.status != 200:
        raise refusal(answer)
    return answer.content


@contextmanager
def faults() -> Iterator[None]:
    """Turn the errors of `runspec.core.http_client` into a `Fault` of the server."""
    try:
        yield
    except LateAnswer as error:
        raise TooSlow(str(error)) from error
    except NoAnswer as error:
        raise Fault(str(error)) from error
