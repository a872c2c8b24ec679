"""Estimates what travels over the declared links: policy versions, and shares of islands.

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

Islands exchange shares: bytes, seconds, and what of them is waited for.

In a step each of k islands offers one share of S bytes and fetches those of the k - 1 others. An
island's upload is shared by those who fetch from it, so island j has all shares after

    transfer_j = (k - 1) S / min( download_j, min over i != j of upload_i ) + R L

where L is the longest declared latency and R the round trips one after another. The host makes
and reads the shares of n parameters, at the rate B of one pass over them, and an island says which
outer state it has come to, in P round trips:

    own  = 6 * 4 n / B + P L    to the host, encode, store, outer update, hash, to the devices
    read = 2 k * 4 n / B        decode k shares, compare each with their mean

What an island waits for is exposed. With overlap, transfer and reading go on beside its updates:

    exposed = own + transfer + read                              without overlap
    exposed = own + max(0, transfer + read - its updates' time)  with overlap
    step_s  = max over islands of their updates' time + max over islands of exposed

The host holds the outer parameters and momentum, the updates' result, their sum and its successors,
with error feedback two residuals, in float32 each, and all encoded shares:

    host_bytes = (6 + 2 feedback) 4 n + k S

An island's utilization is the time of its updates over step_s. Links that nothing declares take no
time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import ceil, inf, log2, prod
from typing import NamedTuple

from bridge.weight_map import file_header, hf_shapes, plan_shards
from runspec.core.models import ModelConfig
from runspec.core.schema import Islands, RunSpec
from runspec.estimate.assumed import REPORT_TRIPS, ROUND_TRIPS, SHARE_BYTES_S, changed_share

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


ASSUMED_UPLOAD = 1e9
"""Bits/s of a relay's link, where the spec declares none."""


def relays_needed(
    spec: RunSpec, config: ModelConfig, workers: int, within_s: float
) -> tuple[int, float]:
    """Return how many relays send a version to all workers in a time, and their upload in bits/s.

    A relay with the least declared upload B serves B T / S workers that fetch S bytes within T.
    """
    upload = min((r.upload for r in spec.broadcast.relays if r.upload), default=ASSUMED_UPLOAD)
    size = version_size(spec, config).follower
    return ceil(workers * size / (upload / 8 * within_s)), upload


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


@cache
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


_OWN_PASSES, _READ_PASSES = 6, 2
"""Passes over the parameters, the latter for each share. CPU seconds of 3.3M parameters on one
core, times `SHARE_BYTES_S` over their bytes, for float32, float16, sparse: own 3.4, 3.8, 4.9,
and one or two between host and devices; for each share 1.2, 2.7, 1.5."""


@dataclass(frozen=True)
class IslandEstimate:
    """One island in one step."""

    name: str
    hardware: str
    """Kind of its accelerators."""
    devices: int | None
    compute_s: float | None
    """Seconds of its updates; None if its peak is unknown."""
    up_bytes: int
    """Bytes that the others fetch from it."""
    down_bytes: int
    """Bytes that it fetches."""
    transfer_s: float
    """Seconds until it has the others' shares, from when the last was offered."""
    utilization: float | None
    """Time of its updates over that of the step."""


@dataclass(frozen=True)
class IslandsEstimate:
    """The islands of a run."""

    codec: str
    share_bytes: int
    """Bytes of one encoded share."""
    whole_bytes: int
    """Bytes of a share in float32."""
    overlap: int
    host_s: float
    """Seconds in which an island makes and reads shares and reports its outer state."""
    host_bytes: int
    """Bytes in an island's host, at the most."""
    exposed_s: float | None
    """Seconds of a step in which the slowest island waits; None if a speed is unknown."""
    islands: tuple[IslandEstimate, ...]


@dataclass(frozen=True)
class Exchange:
    """Bytes and seconds of one step's exchange between islands."""

    share_bytes: int
    whole_bytes: int
    """Bytes of a share in float32."""
    own_s: float
    """Seconds in which an island makes its share and the next outer state, and reports it."""
    read_s: float
    """Seconds in which it reads the shares."""
    host_bytes: int
    transfer_s: Mapping[str, float]
    """Seconds until an island has the others' shares, by its name."""

    def exposed_seconds(self, islands: Islands, compute_s: Mapping[str, float]) -> float:
        """Return the seconds of a step in which the slowest island waits.

        Args:
            islands: of the spec.
            compute_s: seconds of each island's updates, by name.
        """
        hidden = compute_s if islands.overlap else dict.fromkeys(compute_s, 0.0)
        return self.own_s + max(
            max(0.0, seconds + self.read_s - hidden[name])
            for name, seconds in self.transfer_s.items()
        )


def exchange(spec: RunSpec, config: ModelConfig) -> Exchange:
    """Return what a step of a run with islands sends.

    Args:
        spec: has `learner.islands`.
        config: shape of the model.
    """
    from bridge.tensors import codec

    islands = spec.learner.islands
    assert islands is not None, "asked for the exchange of one learner"
    elements = sum(prod(shape) for _, shape in hf_shapes(config))
    used, count = codec(islands.codec.kind), len(islands.members)
    share, whole = used.size(elements), 4 * elements
    latency = max((member.latency or 0.0) for member in islands.members) if count > 1 else 0.0
    up = {member.name: link_rate(member.upload) for member in islands.members}
    transfer = {}
    for member in islands.members:
        others = (rate for name, rate in up.items() if name != member.name)
        rate = min(link_rate(member.download), *others, inf)
        transfer[member.name] = (count - 1) * share / rate + ROUND_TRIPS * latency
    vectors = 8 if used.feedback else 6
    return Exchange(
        share_bytes=share,
        whole_bytes=whole,
        own_s=_OWN_PASSES * whole / SHARE_BYTES_S + REPORT_TRIPS * latency,
        read_s=_READ_PASSES * count * whole / SHARE_BYTES_S,
        host_bytes=vectors * whole + count * share,
        transfer_s=transfer,
    )
