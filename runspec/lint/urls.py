"""URLs of a spec's servers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urlsplit

from runspec.core.spec.schema import RunSpec

_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"[A-Za-z0-9._:%-]{1,253}")


@dataclass(frozen=True)
class Url:
    """The parts of an http or https URL."""

    scheme: str
    host: str
    port: int

    @property
    def shown(self) -> str:
        """As people write it, without a path or a password."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port == _PORTS[self.scheme] else f":{self.port}"
        return f"{self.scheme}://{host}{port}"


def parse_url(text: str) -> Url | None:
    """None for what is no http or https URL with a host."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", parts.port  # a ValueError where it is no port
    except ValueError:
        return None
    if parts.scheme not in _PORTS or not _HOST.fullmatch(host) or port == 0:
        return None
    return Url(parts.scheme, host, port or _PORTS[parts.scheme])


def is_loopback(host: str) -> bool:
    """Whether an address never leaves the machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def server_urls(spec: RunSpec) -> dict[tuple[str, ...], str]:
    """URLs that the spec gives to coordinator, origin and relays, by the location of `url`."""
    given: list[tuple[tuple[str, ...], str | None]] = [
        (("placement",), spec.placement.url),
        (("broadcast", "origin"), spec.broadcast.origin.url),
    ]
    given += [(("broadcast", "relays", r.name), r.url) for r in spec.broadcast.relays]
    return {where: url for where, url in given if url is not None}
