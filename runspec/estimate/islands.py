"""Estimates the exchange of shares between islands: bytes, seconds, and what of them is waited for.

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

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf, prod

from bridge.weight_map import hf_shapes
from runspec.core.models.config import ModelConfig
from runspec.core.spec.schema import Islands, RunSpec
from runspec.estimate.assumed import REPORT_TRIPS, ROUND_TRIPS, SHARE_BYTES_S
from runspec.estimate.broadcast import link_rate

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
    from bridge.codecs import codec  # numpy, which a spec without islands does not wait for

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
