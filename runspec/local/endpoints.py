"""Addresses of the servers of a run: chosen once, written to endpoints.json, kept over restarts."""

from __future__ import annotations

import http.client
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from runspec.core.address import JoinLink
from runspec.core.canonical import MalformedJson, parse_object
from runspec.core.errors import UserError
from runspec.core.process import Endpoints, address, load_endpoints, root_public_key
from runspec.core.schema import RunSpec, role_names
from runspec.core.schema.role_names import members

# Below Linux's ephemeral range (32768 up): a port from there may be another connection's source
# port at the very moment when a killed server wants it back.
PORTS = range(20000, 32000)
_TRIES = 200
_REQUEST_TIMEOUT_S = 0.3
_MAX_ANSWER_BYTES = 1024 * 1024

IsFree = Callable[[str, int], bool]
_EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - what a spec may say, not what is bound here


def plan_endpoints(
    spec: RunSpec, previous: Endpoints | None, is_free: IsFree, rng: random.Random
) -> Endpoints:
    """Chooses a port for each server.

    Args:
        spec: `placement.base_port` fixes consecutive ports; an http `url` of origin or relay its
            own, an https one is a proxy's.
        previous: the run's endpoints so far, kept where they are free.
        is_free: whether a server could listen there.
        rng: draws the ports that nothing fixes.

    Raises:
        UserError: a fixed port is taken, or no free one was found.
    """
    host, away = spec.placement.host, role_names.elsewhere(spec)
    taken: set[int] = set()
    public = {} if spec.placement.url is None else {"coordinator": spec.placement.url.rstrip("/")}

    kept = previous.all() if previous else {}
    figures = fixed_metrics(spec) or (previous.metrics if previous else {})
    spoken_for = {address(url)[1] for url in (*kept.values(), *figures.values())}

    servers = role_names.server_names(spec)

    def place(role: str, url: str | None = None) -> str:
        before = kept.get(role)
        if url is not None and urlsplit(url).scheme == "https":
            public[role], url = url.rstrip("/"), None
        if url is None and spec.placement.base_port is not None:
            url = _url(host, spec.placement.base_port + servers.index(role))
        if url is not None:
            at = address(url)
            if at[1] in taken or not is_free(*at):
                raise port_taken(role, *at)
        elif before is not None and address(before)[1] not in taken and is_free(*address(before)):
            url = before
        else:
            url = _url(host, _draw(host, is_free, rng, taken | spoken_for))
        taken.add(address(url)[1])
        return url.rstrip("/")

    def place_figures() -> Iterator[tuple[str, str]]:
        """A fixed port may be taken: its role says so, and goes on without."""
        setting = spec.placement.metrics
        if setting is None:
            return
        for name in (name for name in role_names.measured_roles(spec) if name not in away):
            url = figures.get(name, "")
            at = address(url) if url else ("", 0)
            if setting.base_port is None:
                if at[0] != setting.host or at[1] in taken or not is_free(*at):
                    url = _url(setting.host, _draw(setting.host, is_free, rng, taken | spoken_for))
                taken.add(address(url)[1])
            yield name, url

    return Endpoints(
        coordinator=place("coordinator"),
        origin=place("origin", spec.broadcast.origin.url),
        relays={
            relay.name: place(f"relay-{relay.name}", relay.url)
            for relay in spec.broadcast.relays
            if f"relay-{relay.name}" not in away
        },
        elsewhere={
            relay.name: relay.url.rstrip("/")
            for relay in spec.broadcast.relays
            if f"relay-{relay.name}" in away and relay.url is not None
        },
        learner=place("learner") if "learner" in servers else None,
        public=public,
        shares={
            member.name: place(role_names.shares_name(member.name), member.url)
            for member in members(spec)
            if role_names.shares_name(member.name) not in away
        },
        islands={
            name: place(name)
            for name in role_names.rendezvous_names(spec)
            if name != "learner" and name not in away
        },
        metrics=dict(place_figures()),
    )


def fixed_metrics(spec: RunSpec) -> dict[str, str]:
    """The addresses of figures by process; none where the spec does not fix their ports.

    On Kubernetes a process has a pod, and so an address, of its own: all but the trunk's have the
    first port.
    """
    place, alone = spec.placement.metrics, spec.placement.backend == "kubernetes"
    if place is None or place.base_port is None:
        return {}
    base, trunk = place.base_port, role_names.trunk_names(spec)
    return {
        name: _url(place.host, base + (0 if alone and name not in trunk else i))
        for i, name in enumerate(role_names.measured_roles(spec))
    }


def fixed_endpoints(spec: RunSpec) -> Endpoints:
    """The endpoints of a site, whose spec fixes every address (`site.site_spec`)."""
    place, relays = spec.placement, spec.broadcast.relays
    base = place.base_port
    assert base is not None, "a site has one"
    ports = {name: base + i for i, name in enumerate(role_names.server_names(spec))}
    listens = {name: _url(place.host, port) for name, port in ports.items()}
    shares = {
        member.name: (member.url or listens[role_names.shares_name(member.name)]).rstrip("/")
        for member in members(spec)
    }
    return Endpoints(
        coordinator=(place.url or listens["coordinator"]).rstrip("/"),
        origin=(spec.broadcast.origin.url or listens["origin"]).rstrip("/"),
        relays={relay.name: relay.url.rstrip("/") for relay in relays if relay.url is not None},
        learner=listens.get("learner"),
        shares=shares,
        islands={
            # The first process of an island is on the machine that serves its shares.
            first: _url(urlsplit(shares[name]).hostname or place.host, ports[first])
            for name, (first, *others) in role_names.island_processes(spec).items()
            if others
        },
        metrics=fixed_metrics(spec),
    )


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def port_answers(host: str, port: int, timeout_s: float = 0.2) -> bool:
    """Whether something accepts connections there."""
    try:
        socket.create_connection((host, port), timeout_s).close()
    except OSError:
        return False
    return True


def port_taken(role: str, host: str, port: int) -> UserError:
    """The error that says which port is taken, and by whom as far as this user may see."""
    owner, inodes = "", {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):  # ended meanwhile, or another user's
            if str(link.readlink()) in inodes:
                process = link.parent.parent
                owner = f"{(process / 'comm').read_text().strip()} (process {process.name})"
                break
    return UserError(
        f"port {port} is taken{f' by {owner}' if owner else ''}",
        place=f"{role} at {host}:{port}",
        remedy="stop that process, or choose others with --set placement.base_port=PORT",
    )


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _draw(host: str, is_free: IsFree, rng: random.Random, taken: set[int]) -> int:
    for _ in range(_TRIES):
        port = rng.choice(PORTS)
        if port not in taken and is_free(host, port):
            return port
    raise UserError(
        f"no free port found in {PORTS.start}-{PORTS.stop - 1}",
        place=f"placement.host {host}",
        remedy="bind to an address of this machine, or set placement.base_port",
    )


def _listening_inodes(port: int) -> list[str]:
    listening, inodes = "0A", []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == listening and int(fields[1].rsplit(":", 1)[1], 16) == port:
                inodes.append(fields[9])
    return inodes


def run_link(run_dir: Path, spec: RunSpec) -> JoinLink | None:
    """Return the link for volunteers; None where the run has no endpoints or no root yet.

    A coordinator is named by the address of the proxy before it (`placement.url`), or where it
    listens on all addresses by this machine's host name.
    """
    try:
        endpoints = load_endpoints(run_dir)
        root = root_public_key(run_dir, spec)
    except UserError:  # not there yet, or another user's
        return None
    if endpoints is None:
        return None
    url = named(endpoints.public.get("coordinator", endpoints.coordinator))
    return JoinLink(url, spec.name, root)


def named(url: str) -> str:
    """The URL, with this machine's name in the place of all its addresses."""
    parts = urlsplit(url)
    if parts.hostname in _EVERYWHERE:
        return f"{parts.scheme}://{socket.gethostname()}:{parts.port}"
    return url


def coordinator_status(url: str) -> dict[str, Any]:
    """The coordinator's `GET /v1/status`; empty while it does not answer at once."""
    host, port = address(url)
    connection = http.client.HTTPConnection(host, port, timeout=_REQUEST_TIMEOUT_S)
    try:
        connection.request("GET", "/v1/status")
        data = connection.getresponse().read(_MAX_ANSWER_BYTES + 1)
        return parse_object(data, max_bytes=_MAX_ANSWER_BYTES)
    except (OSError, http.client.HTTPException, MalformedJson):
        return {}
    finally:
        connection.close()
