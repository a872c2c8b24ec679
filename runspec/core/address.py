"""Addresses of servers: HOST:PORT, base URLs, and the join link that a volunteer receives.

    http://HOST:PORT/#run=NAME&root=HEX[&invite=TEXT]

A client never sends the part behind # to a server. Whoever trusts the sender of a join link trusts
its root key. That root names the keys that sign everything else of the run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, quote, urlsplit

from runspec.core.canonical import is_digest
from runspec.core.errors import UserError

if TYPE_CHECKING:
    from runspec.core.schema import RunSpec

_PRINTABLE = re.compile(r"[!-~]+")
_LONGEST_LINK = 3000
"""Characters of a join link."""
_LINK_FORM = "http://HOST:PORT/#run=NAME&root=HEX"
_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; an IPv6 host may stand in brackets.

    Raises:
        UserError: `text` has another form.
    """
    host, _, port = text.rpartition(":")
    is_port = port.isascii() and port.isdecimal() and len(port) <= 5 and int(port) <= 65535
    if not host or not is_port:
        raise UserError(f"{text!r} is not HOST:PORT", remedy="write for example 127.0.0.1:8080")
    return host.removeprefix("[").removesuffix("]"), int(port)


def is_server_url(text: str) -> bool:
    """Return whether `text` is the base URL of a server: http(s)://host[:port][/prefix]."""
    try:
        parts = urlsplit(text)
        return (
            parts.scheme in ("http", "https")
            and _PRINTABLE.fullmatch(text) is not None
            and bool(parts.hostname)
            and parts.port != 0  # raises ValueError if it is no port
            and not (parts.query or parts.fragment)
        )
    except ValueError:
        return False


@dataclass(frozen=True)
class JoinLink:
    """Parts of a join link; run and root are None for a plain URL."""

    coordinator: str
    """Base URL without a trailing slash."""
    run: str | None = None
    root: str | None = None
    """The root's public key."""
    invite: str | None = None
    """An invitation (`runspec.core.roles`), if the run requires one."""

    def __str__(self) -> str:
        if self.run is None or self.root is None:
            return self.coordinator
        invite = f"&invite={quote(self.invite, safe='')}" if self.invite else ""
        return f"{self.coordinator}/#run={quote(self.run, safe='')}&root={self.root}{invite}"


def parse_join_link(text: str) -> JoinLink:
    """Read a join link, or the plain URL of a coordinator.

    Raises:
        UserError: `text` is neither.
    """
    if len(text) > _LONGEST_LINK:
        raise _no_link(f"a text of {len(text)} characters")
    if not text.isprintable():  # bytes that are not UTF-8 arrive as lone surrogates
        raise _no_link(repr(text[:200]))
    try:
        parts = urlsplit(text)
        port_is_sound = parts.port is None or parts.port > 0
    except ValueError as error:
        raise _no_link(f"{text[:200]!r}: {str(error)[:200]}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname or not port_is_sound:
        raise _no_link(repr(text[:200]))
    if parts.query or parts.username or parts.password:
        raise _no_link(f"{text[:200]!r} with a user or a query")
    said = dict(parse_qsl(parts.fragment))
    if unknown := set(said) - {"run", "root", "invite"}:
        raise _no_link(f"{text[:200]!r} with {', '.join(sorted(unknown))[:80]}")
    root = said.get("root")
    if root is not None and not is_digest(root):
        raise _no_link(f"the root key {root[:80]!r}, which is not 64 hex characters")
    url = f"{parts.scheme}://{parts.netloc}{parts.path}"
    return JoinLink(url.rstrip("/"), said.get("run"), root, said.get("invite"))


def reachable(url: str, link: JoinLink) -> str:
    """Return the URL under which a volunteer reaches another server of the run.

    A server that listens on all addresses or on loopback reports a host that means nothing on
    another machine. The coordinator's host replaces it.
    """
    parts, here = urlsplit(url), urlsplit(link.coordinator)
    unreachable = _is_local(parts.hostname) and not _is_local(here.hostname)
    if parts.hostname not in ("0.0.0.0", "::") and not unreachable:  # noqa: S104
        return url
    host = here.hostname or ""
    name = f"[{host}]" if ":" in host else host
    port = f":{parts.port}" if parts.port else ""
    return f"{parts.scheme}://{name}{port}{parts.path}".rstrip("/")


def _is_local(host: str | None) -> bool:
    return host in ("127.0.0.1", "localhost", "::1")


def _no_link(what: str) -> UserError:
    return UserError(
        f"no join link: {what}",
        place="URL",
        remedy=f"a link is {_LINK_FORM}; `runspec status RUN` prints it where the run is",
    )


@dataclass(frozen=True)
class Url:
    """Parts of an http or https URL."""

    scheme: str
    host: str
    port: int

    @property
    def shown(self) -> str:
        """URL for messages, without path and password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"


def parse_url(text: str) -> Url | None:
    """Return the parts of an http or https URL; None for other text."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port  # raises ValueError if it is no port
    except ValueError:
        return None
    if parts.scheme not in _PORTS or not _HOST.fullmatch(host) or port == 0:
        return None
    return Url(parts.scheme, host, port or _PORTS[parts.scheme])


def is_loopback(host: str) -> bool:
    """Return whether traffic to a host stays on the machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public Internet; one may be inside another."""
    found = ip_address(address.partition("%")[0])
    inner = (found.ipv4_mapped or found.sixtofour) if isinstance(found, IPv6Address) else None
    return is_public(str(inner)) if inner else found.is_global and not found.is_multicast


def server_urls(spec: RunSpec) -> dict[tuple[str, ...], str]:
    """Return the URLs of coordinator, origin, relays and islands, by the location of `url`."""
    given: list[tuple[tuple[str, ...], str | None]] = [
        (("placement",), spec.placement.url),
        (("broadcast", "origin"), spec.broadcast.origin.url),
    ]
    given += [(("broadcast", "relays", r.name), r.url) for r in spec.broadcast.relays]
    members = [] if spec.learner.islands is None else spec.learner.islands.members
    given += [(("learner", "islands", "members", m.name), m.url) for m in members]
    return {where: url for where, url in given if url is not None}
