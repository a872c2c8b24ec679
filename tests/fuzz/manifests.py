"""Lane: manifests of a policy version. `BadSignature`, or a version that keeps every bound."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from broadcast.manifest import (
    KIND,
    MAX_CHUNK_BYTES,
    MAX_MEMORY,
    WeightsManifest,
    is_object_name,
    open_manifest,
    sign_manifest,
)
from runspec.core.hashing import is_digest
from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, sign_document
from tests.fuzz.bounds import bounded
from tests.fuzz.mutate import Changer, damaged_json

KEY = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(32)))
DIGEST, OTHER = "ab" * 32, "cd" * 32
INFO = {
    "size": 30,
    "blake3": DIGEST,
    "chunks": [{"blake3": DIGEST, "size": 20}, {"blake3": OTHER, "size": 10}],
}
ANCHOR = {
    "run": "demo",
    "version": 3,
    "base": None,
    "model_digest": DIGEST,
    "tensors": {"w": {"dtype": "bfloat16", "shape": [2, 3], "blake3": DIGEST}},
    "files": ["a.safetensors"],
    "objects": {"a.safetensors": INFO, "config.json": INFO},
    "delta": {},
}
BOTH = ANCHOR | {"base": 2, "delta": {"a.safetensors.delta": INFO}}
DELTA = BOTH | {"objects": {"config.json": INFO}}
VALID = [ANCHOR, BOTH, DELTA]
SIGNED = [sign_document(KIND, payload, KEY) for payload in VALID]

LEAVES = [
    *(DIGEST, OTHER, "a.safetensors", "config.json", "../x", "manifest.json"),
    *(2**44, MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 1),
]


def check_bounds(manifest: WeightsManifest) -> None:
    assert manifest.run == "demo" and 0 <= manifest.version < 2**31
    assert (manifest.base is None) == (not manifest.delta)
    assert manifest.base is None or 0 <= manifest.base < manifest.version
    assert manifest.is_anchor or manifest.delta
    assert manifest.objects
    for parts in (manifest.objects, manifest.delta):
        for name, info in parts.items():
            assert is_object_name(name) and is_digest(info.blake3)
            assert sum(chunk.size for chunk in info.chunks) == info.size
            assert all(0 < chunk.size <= MAX_CHUNK_BYTES for chunk in info.chunks)
            assert all(manifest.chunks()[c.blake3] == c for c in info.chunks)


def check_payload(payload: dict[str, Any]) -> bool:
    """A signed payload keeps every bound and is signed again as it is, or is not believed."""
    data = sign_document(KIND, payload, KEY)
    with bounded(MAX_MEMORY):
        try:
            manifest = open_manifest(data, run="demo", publishers={KEY.public_hex})
        except BadSignature as error:
            assert len(str(error)) < 10_000
            return False
    check_bounds(manifest)
    assert open_manifest(sign_manifest(manifest, KEY), run="demo", publishers=None) == manifest
    return True


def check_damaged(data: bytes, original: bytes) -> bool:
    """No other bytes are the publisher's word on something else."""
    try:
        manifest = open_manifest(data, run="demo", publishers={KEY.public_hex})
    except BadSignature:
        return False
    assert manifest == open_manifest(original, run="demo", publishers={KEY.public_hex})
    return True


def manifest() -> Callable[[Random], bool]:
    """Signed payloads with changes; half of the cases are damaged bytes."""
    draw = Changer(VALID, LEAVES)

    def case(rng: Random) -> bool:
        if rng.random() < 0.5:
            return check_payload(draw(rng))
        original = rng.choice(SIGNED)
        return check_damaged(damaged_json(rng, original, SIGNED), original)

    return case
