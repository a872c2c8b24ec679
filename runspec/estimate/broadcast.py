"""Estimates the bytes of a policy version, and its arrival times over the declared links.

A node forwards a chunk once the chunk is complete and checked (cut-through), so along a path

    seconds = size / rate + sum over the forwarding nodes of chunk / rate of their link

A node's rate is the least of its parent's rate, its share of the parent's upload and its own
download. A parent's upload is shared max-min: a node that another link limits leaves the rest of
its share to the others. A node starts when its parent has its first chunk.

A delta is smaller than a version. Of n published elements of b bytes, a share s changes from one
version to the next. Their positions take at least n H(s) bits,
H(s) = -s log2 s - (1 - s) log2 (1 - s), which gap codes come close to; their values s n b bytes:

    delta = n (H(s) / 8 + s b)              0.030 bytes an element for s = 0.01 in bfloat16

If that is no less than the whole version, the publisher sends the whole version. Headers count as
elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, log2, prod
from typing import NamedTuple

from bridge.weight_map import file_header, hf_shapes, plan_shards
from runspec.core.models.config import ModelConfig
from runspec.core.spec.schema import RunSpec
from runspec.estimate.assumed import changed_share

ORIGIN = "origin"
_TYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}


@dataclass(frozen=True)
class Arrival:
    """Time at which a node has a whole version, counted from its publication."""

    name: str
    """Name of the role in `status`: `relay-<name>` or `<pool>-<i>`."""
    path: tuple[str, ...]
    """Nodes from the origin to this one."""
    seconds: float
    rate: float
    """Bytes/s."""
    limit: str
    """Field of the spec: the declared link that limits the rate."""


class _Reached(NamedTuple):
    path: tuple[str, ...]
    rate: float
    delay: float
    """Seconds until its first chunk arrives."""
    limit: str


class _Child(NamedTuple):
    name: str
    parent: str
    download: float
    """Bytes/s; infinite if not declared."""
    field: str


def arrivals(spec: RunSpec, size: float) -> list[Arrival]:
    """Return the relays and replicas with a declared link on their path, the slowest last.

    A node uses the first of its upstreams; workers use relays in turn, as the local backend assigns
    them. Nodes without a declared link on their path are left out: their rate is unknown. So are
    nodes without a path to the origin, which the linter reports.

    Args:
        spec: names links, relays and pools.
        size: bytes to send for a version.
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
        # The upload of the parent is shared max-min.
        upload, field = uploads.get(parent, (None, ""))
        left, above = link_rate(upload), reached[parent]
        delay = above.delay + (chunk / above.rate if above.rate < inf else 0.0)
        for number, child in enumerate(sorted(mine, key=lambda one: one.download)):
            own = (left / (len(mine) - number), field), (child.download, child.field)
            rate, limit = min((above.rate, above.limit), *own)
            left -= rate if rate < inf else 0.0
            if child.name not in reached:
                reached[child.name] = _Reached((*above.path, child.name), rate, delay, limit)
                pending.append(child.name)
    found = [
        Arrival(name, node.path, node.delay + size / node.rate, node.rate, node.limit)
        for name, node in reached.items()
        if node.rate < inf
    ]
    return sorted(found, key=lambda arrival: (arrival.seconds, arrival.name))


def _children(spec: RunSpec) -> Iterator[_Child]:
    """Return each node with its parent."""
    relays = [relay.name for relay in spec.broadcast.relays]
    for relay in spec.broadcast.relays:
        if not relay.upstream:
            continue  # no path to the origin; the finding may be suppressed
        field = f"broadcast.relays.{relay.name}.download"
        yield _Child(
            f"relay-{relay.name}", _node(relay.upstream[0]), link_rate(relay.download), field
        )
    for pool in spec.samplers:
        wanted = relays if pool.relays is None else pool.relays
        for index in range(pool.replicas):
            # A pool's own list is an order of preference; without one, workers take turns.
            turn = index % len(wanted) if wanted and pool.relays is None else 0
            parent = _node(wanted[turn]) if wanted else ORIGIN
            field = f"samplers.{pool.name}.download"
            yield _Child(f"{pool.name}-{index}", parent, link_rate(pool.download), field)


def _node(name: str) -> str:
    return ORIGIN if name == ORIGIN else f"relay-{name}"


def link_rate(bits_s: float | None) -> float:
    """Return the bytes/s of a declared link; infinite where nothing is declared."""
    return inf if bits_s is None else bits_s / 8


@dataclass(frozen=True)
class VersionSize:
    """Sizes of one version, in bytes."""

    whole: int
    """Bytes of its safetensors files."""
    delta: float
    """Bytes of the delta from the version before; `whole` if a delta is no smaller."""
    follower: float
    """Bytes that a node with the version before fetches."""
    joiner: float
    """Most bytes that a node without any version fetches: an anchor and the deltas after it."""


def version_size(spec: RunSpec, config: ModelConfig) -> VersionSize:
    """Return the sizes of a version of a run.

    Args:
        spec: names format, type and learning rate.
        config: shape of the model.
    """
    broadcast = spec.broadcast
    whole = version_bytes(config, broadcast.dtype)
    share = changed_share(spec, config).value
    delta = min(float(whole), delta_bytes(config, broadcast.dtype, share))
    if broadcast.format == "full" or delta == whole:  # then every version is an anchor
        return VersionSize(whole, delta, follower=whole, joiner=whole)
    return VersionSize(whole, delta, delta, joiner=whole + (broadcast.anchor_every - 1) * delta)


def version_bytes(config: ModelConfig, dtype: str) -> int:
    """Return the bytes of a version's safetensors files, as the bridge writes them.

    Headers are included. It leaves out config.json, the tokenizer's files and manifest.json,
    which are some megabytes.
    """
    code, width = _TYPES[dtype]
    shards = plan_shards(dict(hf_shapes(config)), width)
    headers = sum(len(file_header(shard, code, width)) for shard in shards)
    return headers + width * sum(prod(shape) for _, shape in hf_shapes(config))


def delta_bytes(config: ModelConfig, dtype: str, share: float) -> float:
    """Return the bytes of a delta in which `share` of the elements changed."""
    width = _TYPES[dtype][1]
    unsure = 0.0 if share in (0.0, 1.0) else -sum(p * log2(p) for p in (share, 1.0 - share))
    return version_bytes(config, dtype) * (unsure / 8 + share * width) / width
