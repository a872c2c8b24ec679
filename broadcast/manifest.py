"""The weights manifest: the publisher's signed word on what a policy version is, byte for byte."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runspec.common.keys import SigningKey

KIND = "weights"
FILE_NAME = "manifest.json"
"""Name of the signed manifest in a fetched version's directory."""
MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True)
class Chunk:
    """A piece of an object; `blake3` names it in the store."""

    blake3: str
    size: int


@dataclass(frozen=True)
class ObjectInfo:
    """One file of a version: its chunks one after the other."""

    size: int
    blake3: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class WeightsManifest:
    """What one version of a run consists of."""

    run: str
    version: int
    base: int | None
    """The version that this one's deltas start from; None where it stands alone."""
    model_digest: str | None
    """One digest of all weights (`bridge.tensors.model_digest`); None where none was given."""
    tensors: dict[str, dict[str, Any]]
    """For each tensor {dtype, shape, blake3}, as the bridge's `tensors.json` says."""
    objects: dict[str, ObjectInfo]
    """The files by name."""


def sign_manifest(manifest: WeightsManifest, key: SigningKey) -> bytes:
    """The signed manifest; its BLAKE3 is the manifest digest that leases and latest.json name."""
    raise NotImplementedError


def open_manifest(data: bytes, *, run: str, publishers: Collection[str]) -> WeightsManifest:
    """Checks a manifest from outside.

    Raises:
        BadSignature: not a publisher's, another run's, malformed, or beyond a bound.
    """
    raise NotImplementedError


def read_manifest(directory: Path) -> WeightsManifest:
    """The manifest of a version that `WeightsClient.fetch` put there (it was checked then)."""
    raise NotImplementedError
