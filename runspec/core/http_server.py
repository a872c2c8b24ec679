"""HTTP edge of servers: sockets, client addresses, rates; and figures of roles for Prometheus.

Coordinator, origin, relay and page share the edge. `runspec.core.connection_limits` limits the
connections of such a server.

The names of figures are

    runspec_<role>_<what>_<unit>

Units are seconds and bytes, and a counter ends in _total. What there are several of, as of checks
or stages, is a label. Coordinator, origin and relays have `/metrics` at their own address; origin
and relays have `broadcast` in the place of the role. The other roles call `serve_metrics`.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
import threading
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, asynccontextmanager, contextmanager
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import Any, TypeVar

from aiohttp import web
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from runspec.core.address import parse_address
from runspec.core.connection_limits import ConnectionLimiter, ConnectionLimits, Observer
from runspec.core.errors import UserError

MAX_BUCKETS = 100_000
"""Names that `TokenBuckets` remembers; beyond them a new name must wait."""
UNKNOWN = "unknown"
"""Stands for requests without an address, such as through a Unix socket."""
_MAX_HOPS = 8
_IPV6_PREFIX = 64
_BACKLOG = 1024
_SHUTDOWN_S = 0.5

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network


@asynccontextmanager
async def serving(
    application: web.Application,
    address: tuple[str, int],
    limits: ConnectionLimits,
    observer: Observer,
    log: logging.Logger,
    *,
    tls: Callable[[], ssl.SSLContext] | None = None,
) -> AsyncIterator[tuple[int, ConnectionLimiter]]:
    """Answer requests within the block; yield the port, and what limits the connections.

    A handler is cancelled when its client disconnects. What is open at the end of the block is
    closed within a second.

    Args:
        application: its outermost middleware is `connection_limits.answering`.
        address: host, of which every address is listened at, and port; port 0 takes a free one.
        limits: of the connections.
        observer: is called when a connection is closed or a request malformed.
        log: receives errors of `accept`.
        tls: returns the context for the next connection; None: plain HTTP.

    Raises:
        UserError: the port is taken, or the host is not of this machine.
    """
    runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    assert runner.server is not None
    limiter = ConnectionLimiter(runner.server, limits, observer, log, tls=tls)
    try:
        with ExitStack() as stack:
            listeners = [stack.enter_context(each) for each in _listeners(*address)]
            for listener in listeners:
                limiter.open(listener)
            try:
                yield listeners[0].getsockname()[1], limiter
            finally:
                await limiter.close()
    finally:
        await runner.cleanup()
        await limiter.abandon()


async def until(stop: asyncio.Event, *work: Awaitable[Any]) -> None:
    """Run the work until `stop` is set, one of it ends or fails, or cancellation."""
    tasks = [asyncio.ensure_future(each) for each in (*work, stop.wait())]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _listeners(host: str, port: int) -> list[socket.socket]:
    """Return listening sockets at every address of a host, all at one port."""
    listeners: list[socket.socket] = []
    with ExitStack() as on_error:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            for family, at in dict.fromkeys((each[0], str(each[4][0])) for each in found):
                listener = socket.create_server((at, port), family=family, backlog=_BACKLOG)
                on_error.callback(listener.close)
                listener.setblocking(False)
                listeners.append(listener)
                port = listener.getsockname()[1]
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            raise UserError(
                "the port is taken" if taken else f"cannot listen: {error.strerror or error}",
                place=f"{host}:{port}",
                remedy="end the process that holds it, or listen on another port"
                if taken
                else "give an address of this machine with --listen",
            ) from error
        on_error.pop_all()
    return listeners


def client_address(
    remote: str | None, forwarded: Sequence[str] = (), proxies: Sequence[Network] = ()
) -> str:
    """Return the client's IPv4 address or IPv6 network, or `UNKNOWN`.

    An IPv6 /64 counts as one address, because a customer gets at least a /64.

    Args:
        remote: address at the other end of the connection.
        forwarded: the request's `X-Forwarded-For` headers, in order.
        proxies: addresses whose header is trusted.
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


class TokenBuckets:
    """A token bucket for each name, kept as the time at which it is full again.

    This is the generic cell rate algorithm (ITU-T I.371). A bucket that is not further in debt than
    its caller allows gives any amount, so the average holds even where one amount is larger than
    the bucket. A full bucket is forgotten, so only names that asked lately use memory.

    Args:
        max_names: names remembered; beyond them a new name must wait.
    """

    def __init__(self, max_names: int = MAX_BUCKETS) -> None:
        self._max = max_names
        self._full_at: dict[Hashable, float] = {}

    def wait_s(self, name: Hashable, allowed_s: float, now: float) -> float:
        """Return the seconds until a bucket is full within `allowed_s` seconds; 0.0: it is."""
        if name not in self._full_at and len(self._full_at) >= self._max:
            self._full_at = {n: at for n, at in self._full_at.items() if at > now}
            if len(self._full_at) >= self._max:
                return min(self._full_at.values()) - now
        debt_s = max(self._full_at.get(name, now), now) - now
        return debt_s - allowed_s if debt_s > allowed_s + 1e-9 * (1.0 + allowed_s) else 0.0

    def take(self, name: Hashable, cost_s: float, now: float) -> None:
        """Take what the bucket needs `cost_s` seconds to regain."""
        self._full_at[name] = max(self._full_at.get(name, now), now) + cost_s


@contextmanager
def at_once(counts: Counter[Hashable], limits: Mapping[Hashable, int]) -> Iterator[bool]:
    """Count something for some names within the block; yield whether each limit allows it.

    Args:
        counts: what goes on now, by name.
        limits: how much may go on of each name.
    """
    counts.update(limits.keys())
    try:
        yield all(counts[name] <= most for name, most in limits.items())
    finally:
        for name in limits:
            counts[name] -= 1
            if not counts[name]:
                del counts[name]


PREFIX = "runspec_"
Value = float | Mapping[str, float] | None
"""A number, numbers by the value of a label, or None where there is none yet."""
_Family = TypeVar("_Family", GaugeMetricFamily, CounterMetricFamily)


def gauge(name: str, text: str, value: Value, label: str | None = None) -> GaugeMetricFamily:
    """Return a figure that goes up and down.

    Args:
        name: without the prefix.
        text: what it is.
        value: the figure.
        label: name of the label, where `value` is a mapping.
    """
    return _filled(GaugeMetricFamily(PREFIX + name, text, labels=_labels(label)), value)


def counter(name: str, text: str, value: Value, label: str | None = None) -> CounterMetricFamily:
    """Return a figure that only grows; Prometheus sees its name with _total.

    Args:
        name, text, value, label: see `gauge`.
    """
    return _filled(CounterMetricFamily(PREFIX + name, text, labels=_labels(label)), value)


def _labels(label: str | None) -> list[str]:
    return [] if label is None else [label]


def _filled(family: _Family, value: Value) -> _Family:
    if isinstance(value, Mapping):
        for of, each in value.items():
            family.add_metric([of], each)
    elif value is not None:
        family.add_metric([], value)
    return family


def serve_metrics(listen: str | None, figures: Collector, log: logging.Logger) -> None:
    """Serve a role's figures, and those of its process, until the process ends.

    The role does not wait: daemon threads bind the address and answer. Without the address the
    figures are lost, one warning says so, and the role goes on.

    Args:
        listen: HOST:PORT; None: nowhere.
        figures: read at each request, by another thread than the role's.
        log: the role's.
    """
    if listen is not None:
        target, given = _serve, (listen, figures, log)
        threading.Thread(target=target, args=given, name="metrics", daemon=True).start()


def _serve(listen: str, figures: Collector, log: logging.Logger) -> None:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(figures)
    try:
        host, port = parse_address(listen)
        start_http_server(port, host, registry=registry)  # it may look its own name up, slowly
    except (OSError, UserError) as error:
        log.warning("no metrics at %s, going on without: %s", listen, error)
