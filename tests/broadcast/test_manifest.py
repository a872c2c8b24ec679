"""The manifest's parser against valid, damaged and invented manifests."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broadcast.manifest import (
    KIND,
    MAX_CHUNK_BYTES,
    Chunk,
    ObjectInfo,
    WeightsManifest,
    is_object_name,
    open_manifest,
    sign_manifest,
)
from runspec.common.keys import SigningKey
from runspec.common.signed import BadSignature, sign_document

KEY = SigningKey.generate()
DIGEST = "ab" * 32


def payload() -> dict[str, Any]:
    return {
        "run": "demo",
        "version": 3,
        "base": None,
        "model_digest": DIGEST,
        "tensors": {"w": {"dtype": "bfloat16", "shape": [2, 3], "blake3": DIGEST}},
        "files": ["model.safetensors"],
        "delta": {},
        "objects": {
            "model.safetensors": {
                "size": 30,
                "blake3": DIGEST,
                "chunks": [{"blake3": DIGEST, "size": 20}, {"blake3": "cd" * 32, "size": 10}],
            }
        },
    }


def opened(value: dict[str, Any]) -> WeightsManifest:
    return open_manifest(sign_document(KIND, value, KEY), run="demo", publishers={KEY.public_hex})


def test_what_is_signed_is_what_is_opened() -> None:
    chunk = Chunk(DIGEST, 7)
    made = ObjectInfo(14, DIGEST, (chunk, chunk))
    manifest = WeightsManifest("demo", 1, 0, DIGEST, {}, ("w",), {"x": made}, {"w.delta": made})
    data = sign_manifest(manifest, KEY)
    assert open_manifest(data, run="demo", publishers={KEY.public_hex}) == manifest
    assert manifest.chunks() == {DIGEST: chunk}


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["version"], -1, "version"),
        (["version"], True, "version"),
        (["version"], 2**31, "version"),
        (["base"], 3, "base must be an older"),
        (["run"], "other", "of run 'other'"),
        (["model_digest"], "x", "model_digest"),
        (["objects"], {}, "neither whole nor a delta"),
        (["base"], 2, "a base needs a delta"),
        (["delta"], {"x": {"size": 0, "blake3": DIGEST, "chunks": []}}, "and a delta a base"),
        (["files"], ["model.safetensors", "other.safetensors"], "neither whole"),
        (["files"], ["../x"], "safe names"),
        (["files"], ["model.safetensors"] * 2, "none twice"),
        (["extra"], 1, "fields"),
        (["tensors", "w", "shape"], [-1], "shape"),
        (["tensors", "w", "blake3"], DIGEST.upper(), "blake3"),
        (["objects", "model.safetensors", "size"], 31, "add up"),
        (["objects", "model.safetensors", "chunks", 0, "size"], 0, "malformed"),
        (["objects", "model.safetensors", "chunks", 0, "size"], MAX_CHUNK_BYTES + 1, "malformed"),
        (["objects", "model.safetensors", "chunks", 0, "blake3"], "../../etc/passwd", "malformed"),
    ],
)
def test_one_wrong_field_is_enough(path: list[Any], value: object, said: str) -> None:
    changed = payload()
    node: Any = changed
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = value
    with pytest.raises(BadSignature, match=said):
        opened(changed)


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/b", "", ".hidden", "manifest.json", "x" * 201, "a\x00b", "a\n", "é"],
)
def test_unsafe_names_are_refused(name: str) -> None:
    changed = payload()
    changed["objects"][name] = changed["objects"].pop("model.safetensors")
    with pytest.raises(BadSignature, match="not a safe file name"):
        opened(changed)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
    | st.just(DIGEST),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.text(st.characters(exclude_categories=["Cs"]), max_size=8), inner, max_size=3
        )
    ),
    max_leaves=6,
)


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a JSON value."""
    found = [path] if path else []
    children = (
        node.items()
        if isinstance(node, dict)
        else enumerate(node)
        if isinstance(node, list)
        else ()
    )
    for key, child in children:
        found += places(child, (*path, key))
    return found


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_change_is_refused_or_keeps_every_bound(data: st.DataObject) -> None:
    changed = copy.deepcopy(payload())
    for _ in range(data.draw(st.integers(1, 2))):
        *parents, last = data.draw(st.sampled_from(places(changed)))
        node: Any = changed
        for key in parents:
            node = node[key]
        node[last] = data.draw(JSON)
    try:
        manifest = opened(changed)
    except BadSignature:
        return
    assert manifest.run == "demo" and 0 <= manifest.version < 2**31
    for name, info in manifest.objects.items():
        assert is_object_name(name)
        assert sum(chunk.size for chunk in info.chunks) == info.size
        assert all(0 < chunk.size <= MAX_CHUNK_BYTES for chunk in info.chunks)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=300) | st.builds(lambda t: t.encode("utf-8", "replace"), st.text()))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(BadSignature):
        open_manifest(data, run="demo", publishers=None)


@settings(deadline=None)
@given(at=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused(at: int, bit: int) -> None:
    data = bytearray(sign_document(KIND, payload(), KEY))
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(BadSignature):
        open_manifest(bytes(data), run="demo", publishers={KEY.public_hex})
