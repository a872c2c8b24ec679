"""Whatever is in a manifest: `BadSignature`, or a version that keeps every bound."""

from __future__ import annotations

from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

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
from tests.fuzz.campaign import campaign
from tests.fuzz.json_values import changed, damaged, values

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

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
anything = values(LEAVES, [INFO, INFO["chunks"], ANCHOR["tensors"]])


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


@campaign
@given(payload=changed(VALID, anything))
def test_signed_payloads(payload: dict[str, Any]) -> None:
    check_payload(payload)


@campaign
@given(case=damaged(SIGNED))
def test_damaged_bytes(case: tuple[bytes, bytes]) -> None:
    check_damaged(*case)


@campaign
@given(data=st.binary(max_size=300))
def test_manifest_of_any_bytes(data: bytes) -> None:
    with pytest.raises(BadSignature):
        open_manifest(data, run="demo", publishers=None)
