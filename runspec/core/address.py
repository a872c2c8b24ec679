"""Where a server listens, and the URLs of servers, as command lines and specs write them."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from runspec.core.errors import UserError

_PRINTABLE = re.compile(r"[!-~]+")


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of HOST:PORT; an IPv6 host may stand in brackets.

    Raises:
        UserError: it is no such text.
    """
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    if not host or not is_port:
        raise UserError(f"{text!r} is not HOST:PORT", remedy="write for example 127.0.0.1:8080")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_server_url(text: str) -> bool:
    """Whether `text` is the base URL of a server: http(s)://host[:port][/prefix]."""
    try:
        parts = urlsplit(text)
        return (
            parts.scheme in ("http", "https")
            and _PRINTABLE.fullmatch(text) is not None
            and bool(parts.hostname)
            and parts.port != 0  # reading it raises ValueError if it is no port
            and not (parts.query or parts.fragment)
        )
    except ValueError:
        return False
