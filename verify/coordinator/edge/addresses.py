"""The address of a client, which the limits of unregistered keys count by.

`X-Forwarded-For` counts only from a proxy that `verify.proxies` lists, because anybody can send it.
Each proxy appends the address of its own client, so the client is the last entry that is no
proxy's. An IPv6 /64 counts as one address: a customer has at least that many.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

FORWARDED = "X-Forwarded-For"
UNKNOWN = "unknown"
"""Stands for requests without an address, such as through a Unix socket."""
_MAX_HOPS = 8
_IPV6_PREFIX = 64

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def networks(ranges: Iterable[str]) -> tuple[Network, ...]:
    """Parse the address ranges of `verify.proxies`, such as 10.0.0.7 or 10.0.0.0/24."""
    return tuple(ip_network(each) for each in ranges)


def client_address(remote: str | None, forwarded: Sequence[str], proxies: Sequence[Network]) -> str:
    """Return the client's IPv4 address or IPv6 network, or `UNKNOWN`.

    Args:
        remote: address at the other end of the connection.
        forwarded: the request's `X-Forwarded-For` headers, in order.
        proxies: addresses whose header is believed.
    """
    address = _parse(remote or "")
    hops = ",".join(forwarded).rsplit(",", _MAX_HOPS)[-_MAX_HOPS:] if forwarded else []
    while hops and address is not None and any(address in proxy for proxy in proxies):
        before = _parse(hops.pop())
        if before is None:  # the proxy sent no address: the request counts as its own
            break
        address = before
    if isinstance(address, IPv6Address):
        return str(IPv6Network((int(address), _IPV6_PREFIX), strict=False))
    return UNKNOWN if address is None else str(address)


def _parse(text: str) -> Address | None:
    """Parse an address with or without a port; IPv4 written as IPv6 becomes IPv4."""
    text = text.strip()
    if text.startswith("["):
        text = text[1:].partition("]")[0]
    elif text.count(":") == 1:
        text = text.partition(":")[0]
    try:
        address = ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
