"""How many bytes a policy version has: whole, for those who hold the one before, for a joiner.

Of n published elements of b bytes a share s has other bits than in the version before. Which ones
they are takes n H(s) bits at least, H(s) = -s log2 s - (1 - s) log2 (1 - s), which gap codes come
close to; what they are now, s n b bytes:

    delta = n (H(s) / 8 + s b)              0.030 bytes an element for s = 0.01 in bfloat16

Where that is no less than the whole version, the publisher sends that instead. Headers count as
elements.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2, prod

from bridge.shards import file_header, plan_shards
from bridge.weight_map import hf_shapes
from runspec.core.models.config import ModelConfig
from runspec.core.spec.schema import RunSpec
from runspec.estimate.assumed import changed_share

_TYPES = {"float32": ("F32", 4), "bfloat16": ("BF16", 2)}


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
