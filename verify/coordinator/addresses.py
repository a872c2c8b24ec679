"""Where a request comes from, as far as that can be known: by this the rates of strangers count.

A key costs nothing, an address something. Of IPv6 a customer has a /64 at the least, so a /64
counts as one place.

A header that names the client is believed only of a proxy that `verify.proxies` lists: anybody can
write one. Each proxy appends the address that it was asked from, so the client is the last entry
that is no proxy's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

FORWARDED = "X-Forwarded-For"
UNKNOWN = "unknown"
"""The place of requests without an address, as through a socket in the file system."""
_MAX_HOPS = 8
_IPV6_PREFIX = 64

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


def networks(ranges: Iterable[str]) -> tuple[Network, ...]:
    """The address ranges of `verify.proxies`, each like 10.0.0.7 or 10.0.0.0/24."""
    return tuple(ip_network(each) for each in ranges)


def place_of(remote: str | None, forwarded: Sequence[str], proxies: Sequence[Network]) -> str:
    """Names the place that a request comes from.

    Args:
        remote: address at the other end of the connection.
        forwarded: the request's `X-Forwarded-For` headers, in order.
        proxies: believed of what they say there.

    Returns:
        An IPv4 address, an IPv6 network, or `UNKNOWN`.
    """
    address = _address(remote or "")
    hops = ",".join(forwarded).rsplit(",", _MAX_HOPS)[-_MAX_HOPS:] if forwarded else []
    while hops and address is not None and any(address in proxy for proxy in proxies):
        before = _address(hops.pop())
        if before is None:  # the proxy's own fault, or no header of its own: it answers for it
            break
        address = before
    if address is None:
        return UNKNOWN
    if isinstance(address, IPv6Address):
        return str(IPv6Network((int(address), _IPV6_PREFIX), strict=False))
    return str(address)


def _address(text: str) -> Address | None:
    """An address, with or without a port; one of IPv4 that is written as IPv6 is IPv4's."""
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
