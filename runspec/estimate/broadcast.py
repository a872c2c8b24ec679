"""When everybody has a policy version, over the links that are declared.

A node forwards a chunk once it has it whole and checked (cut-through), so along a path

    seconds = size / rate + sum over the forwarding nodes of chunk / rate of their link

where a node's rate is the least of what its parent gets, its share of its parent's upload and its
own download. A parent's upload is shared max-min: whom something else limits leaves the rest of
its share to the others. Nobody begins before its parent has its first chunk.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, log2, prod

from bridge.shards import file_header, plan_shards
from bridge.weight_map import hf_shapes
from runspec.core.models.config import ModelConfig
from runspec.core.spec.schema import RunSpec
from runspec.estimate.assumed import changed_share

ORIGIN = "origin"

_TYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}


@dataclass(frozen=True)
class Arrival:
    """When a node has the whole of a version, counted from its publication."""

    name: str
    """`relay-<name>`, or `<pool>-<i>`: the role's name in `status`."""
    path: tuple[str, ...]
    """From the origin to the node."""
    seconds: float
    rate: float
    """Bytes/s."""
    limit: str
    """The declared link that bounds the rate: a field of the spec."""


@dataclass(frozen=True)
class _Reached:
    path: tuple[str, ...]
    rate: float
    delay: float
    """Until its first chunk comes."""
    limit: str


@dataclass(frozen=True)
class _Child:
    name: str
    parent: str
    download: float
    """Bytes/s; infinite where nothing is declared."""
    field: str


def arrivals(spec: RunSpec, size: float) -> list[Arrival]:
    """Every relay and replica that a declared link stands before, the slowest last.

    A node takes the first of its upstreams; workers take relays in turn, as the local backend deals
    them out. Nodes without a declared link on their path are left out: nothing is known of them.
    So are nodes without a path to the origin, which is a finding of its own.

    Args:
        spec: links, relays and pools.
        size: bytes that travel for a version.
    """
    chunk = min(float(spec.broadcast.chunk_bytes), size)
    reached = {ORIGIN: _Reached((ORIGIN,), inf, 0.0, "")}
    uploads = {ORIGIN: (spec.broadcast.origin.upload, "broadcast.origin.upload")}
    for relay in spec.broadcast.relays:
        field = f"broadcast.relays.{relay.name}.upload"
        uploads[f"relay-{relay.name}"] = (relay.upload, field)
    children: dict[str, list[_Child]] = {}
    for child in _children(spec):
        children.setdefault(child.parent, []).append(child)
    pending = [ORIGIN]
    while pending:
        parent = pending.pop()
        mine = children.get(parent, [])
        for child, node in _served(reached[parent], uploads.get(parent), mine, chunk):
            if child.name not in reached:
                reached[child.name] = node
                pending.append(child.name)
    found = [
        Arrival(name, node.path, node.delay + size / node.rate, node.rate, node.limit)
        for name, node in reached.items()
        if node.rate < inf
    ]
    return sorted(found, key=lambda arrival: (arrival.seconds, arrival.name))


def broadcast_times(spec: RunSpec, size: float) -> dict[str, float]:
    """Seconds from publication until a relay or replica has a version; see `arrivals`."""
    return {arrival.name: arrival.seconds for arrival in arrivals(spec, size)}


def _children(spec: RunSpec) -> Iterator[_Child]:
    """Who fetches from whom."""
    relays = [relay.name for relay in spec.broadcast.relays]
    for relay in spec.broadcast.relays:
        if not relay.upstream:
            continue  # no path to the origin, which may have been accepted
        field = f"broadcast.relays.{relay.name}.download"
        yield _Child(f"relay-{relay.name}", _node(relay.upstream[0]), _rate(relay.download), field)
    for pool in spec.samplers:
        wanted = relays if pool.relays is None else pool.relays
        for index in range(pool.replicas):
            # A pool's own list is an order of preference; without one, workers take turns.
            turn = index % len(wanted) if wanted and pool.relays is None else 0
            parent = _node(wanted[turn]) if wanted else ORIGIN
            field = f"samplers.{pool.name}.download"
            yield _Child(f"{pool.name}-{index}", parent, _rate(pool.download), field)


def _served(
    parent: _Reached,
    upload: tuple[float | None, str] | None,
    children: list[_Child],
    chunk: float,
) -> Iterator[tuple[_Child, _Reached]]:
    """What each child of a node gets, its upload shared max-min."""
    left, field = (_rate(upload[0]), upload[1]) if upload else (inf, "")
    delay = parent.delay + (chunk / parent.rate if parent.rate < inf else 0.0)
    for number, child in enumerate(sorted(children, key=lambda one: one.download)):
        share = left / (len(children) - number)
        rate, limit = min(
            (parent.rate, parent.limit), (share, field), (child.download, child.field)
        )
        left -= rate if rate < inf else 0.0
        yield child, _Reached((*parent.path, child.name), rate, delay, limit)


def _node(name: str) -> str:
    return ORIGIN if name == ORIGIN else f"relay-{name}"


def _rate(bits_s: float | None) -> float:
    """Bytes/s of a declared link; infinite where nothing is declared."""
    return inf if bits_s is None else bits_s / 8


@dataclass(frozen=True)
class VersionSize:
    """What travels for one version, in bytes."""

    whole: int
    """Its safetensors files."""
    delta: float
    """What turns the version before into it; `whole` where deltas are smaller by nothing."""
    follower: float
    """Fetched by whoever holds the version before."""
    joiner: float
    """Fetched at most by whoever holds none: an anchor, and the deltas after it."""


def version_size(spec: RunSpec, config: ModelConfig) -> VersionSize:
    """What travels for a version of a run.

    Args:
        spec: format, type and learning rate.
        config: the model's shape.
    """
    broadcast = spec.broadcast
    whole = version_bytes(config, broadcast.dtype)
    share = changed_share(spec, config).value
    delta = min(float(whole), delta_bytes(config, broadcast.dtype, share))
    if broadcast.format == "full" or delta == whole:  # then every version is an anchor
        return VersionSize(whole, delta, follower=whole, joiner=whole)
    return VersionSize(whole, delta, delta, joiner=whole + (broadcast.anchor_every - 1) * delta)


def version_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of a version's safetensors files, headers included, exactly as the bridge writes them.

    Left out: config.json, the tokenizer's files and manifest.json, some megabytes.
    """
    code, width = _TYPES[dtype]
    shards = plan_shards(dict(hf_shapes(config)), width)
    headers = sum(len(file_header(shard, code, width)) for shard in shards)
    return headers + width * sum(prod(shape) for _, shape in hf_shapes(config))


def delta_bytes(config: ModelConfig, dtype: str, share: float) -> float:
    """Bytes of a delta in which `share` of the elements changed."""
    width = _TYPES[dtype][1]
    unsure = 0.0 if share in (0.0, 1.0) else -sum(p * log2(p) for p in (share, 1.0 - share))
    return version_bytes(config, dtype) * (unsure / 8 + share * width) / width
