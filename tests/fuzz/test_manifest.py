"""Whatever is in a manifest: `BadSignature`, or a version that keeps every bound."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from broadcast.manifest import (
    KIND,
    MAX_CHUNK_BYTES,
    WeightsManifest,
    is_object_name,
    open_manifest,
    sign_manifest,
)
from runspec.common.hashing import is_digest
from runspec.common.keys import SigningKey
from runspec.common.signed import BadSignature, sign_document
from tests.fuzz.campaign import campaign

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

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text
    | st.sampled_from([DIGEST, OTHER, "a.safetensors", "config.json", "../x", "manifest.json"])
    | st.sampled_from([10**30, -(2**63), 2**44, MAX_CHUNK_BYTES, MAX_CHUNK_BYTES + 1, 1e300])
)
anything = st.recursive(
    leaves | st.sampled_from([INFO, INFO["chunks"], ANCHOR["tensors"]]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=8,
)

pieces = st.sampled_from(
    [b"", b'"', b"{", b"]" * 40, b"[" * 40, b"\\u0061", b" ", b",", b"9" * 99, b"1.0", b"true"]
)


def containers(node: Any) -> list[Any]:
    """Every object and list in a JSON value that has something in it."""
    inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
    return ([node] if inner else []) + [found for child in inner for found in containers(child)]


@st.composite
def payloads(draw: st.DrawFn) -> dict[str, Any]:
    """A valid payload, changed in up to four places: replaced, removed, added, doubled, nested."""
    payload: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(0, 4))):
        found = containers(payload)
        if not found:
            break
        node = draw(st.sampled_from(found))
        key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        match draw(st.sampled_from(["replace", "remove", "add", "double", "nest"])):
            case "replace":
                node[key] = copy.deepcopy(draw(anything))
            case "remove":
                del node[key]
            case "add" if isinstance(node, dict):
                node[draw(text)] = copy.deepcopy(draw(anything))
            case "double" if isinstance(node, list):
                node.append(copy.deepcopy(node[key]))
            case _:
                for _ in range(draw(st.integers(1, 40))):
                    node[key] = [node[key]]
    return payload


@st.composite
def damaged(draw: st.DrawFn) -> tuple[bytes, WeightsManifest]:
    """A signed manifest with changed bytes, and what it was."""
    original = draw(st.sampled_from(SIGNED))
    data = bytearray(original)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(data)))
        end = min(len(data), start + draw(st.integers(0, 30)))
        piece = draw(st.binary(max_size=8) | pieces | st.just(bytes(data[start:end]) * 2))
        data[start:end] = piece
    return bytes(data), open_manifest(original, run="demo", publishers={KEY.public_hex})


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


@campaign
@given(payload=payloads())
def test_signed_payloads(payload: dict[str, Any]) -> None:
    data = sign_document(KIND, payload, KEY)
    try:
        manifest = open_manifest(data, run="demo", publishers={KEY.public_hex})
    except BadSignature:
        return
    check_bounds(manifest)
    assert open_manifest(sign_manifest(manifest, KEY), run="demo", publishers=None) == manifest


@campaign
@given(case=damaged())
def test_damaged_bytes(case: tuple[bytes, WeightsManifest]) -> None:
    data, original = case
    try:
        manifest = open_manifest(data, run="demo", publishers={KEY.public_hex})
    except BadSignature:
        return
    assert manifest == original, "no other bytes are the publisher's word on something else"


@campaign
@given(data=st.binary(max_size=300))
def test_manifest_of_any_bytes(data: bytes) -> None:
    with pytest.raises(BadSignature):
        open_manifest(data, run="demo", publishers=None)
