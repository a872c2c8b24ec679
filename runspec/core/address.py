"""Where a server listens, as its command line says it."""

from __future__ import annotations

from runspec.core.errors import UserError


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
