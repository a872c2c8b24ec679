"""What a client of the published `shardcast` package asks for, made of the store's own chunks.

    GET /<run>/shardcast/distribution.txt
    GET /<run>/shardcast/v<N>/shard_<number from 00001>.bin
    GET /<run>/shardcast/data1.bin

That client knows one file a version and joins its shards, so it sees the anchors whose weights are
the one file `model.safetensors`. It checks the BLAKE3 of the whole, but no signature.
"""

from __future__ import annotations

from collections.abc import Mapping

from broadcast.manifest import Chunk, WeightsManifest

WEIGHTS = "model.safetensors"
PROBE = bytes(64 * 1024)
"""`data1.bin`, by which that client measures a server before anything else."""


def distribution(manifests: Mapping[int, WeightsManifest]) -> str:
    """`distribution.txt`: for each version a line `v<N>: <BLAKE3 of the weights>|<shards>`."""
    lines = []
    for version in sorted(manifests):
        if _has_one_file(manifests[version]):
            weights = manifests[version].objects[WEIGHTS]
            lines.append(f"v{version}: {weights.blake3}|{len(weights.chunks)}\n")
    return "".join(lines)


def shard(manifest: WeightsManifest, number: int) -> Chunk | None:
    """The chunk that is shard `number` (from 1) of a version; None where there is no such."""
    if not _has_one_file(manifest):
        return None
    chunks = manifest.objects[WEIGHTS].chunks
    return chunks[number - 1] if 1 <= number <= len(chunks) else None


def _has_one_file(manifest: WeightsManifest) -> bool:
    return (
        manifest.files in ((WEIGHTS,), ())  # () where the publisher named no tensors
        and manifest.is_anchor
        and WEIGHTS in manifest.objects
    )
