"""The manifest's parser against valid, damaged and invented manifests."""

from __future__ import annotations

from typing import Any

import pytest

from broadcast.manifest import (
    KIND,
    MAX_BYTES,
    MAX_CHUNK_BYTES,
    MAX_OBJECTS,
    MAX_VALUES,
    Chunk,
    ObjectInfo,
    WeightsManifest,
    open_manifest,
    sign_manifest,
)
from runspec.core.signed import BadSignature, SigningKey, sign_document

KEY = SigningKey.generate()
DIGEST = "ab" * 32
UNSAFE = ["../x", "/etc/passwd", "a/b", "", ".hidden", "manifest.json", "x" * 201, "a\x00b", "é"]


def payload() -> dict[str, Any]:
    chunks = [{"blake3": DIGEST, "size": 20}, {"blake3": "cd" * 32, "size": 10}]
    return {
        "run": "demo",
        "version": 3,
        "base": None,
        "model_digest": DIGEST,
        "tensors": {"w": {"dtype": "bfloat16", "shape": [2, 3], "blake3": DIGEST}},
        "files": ["w.safetensors"],
        "delta": {},
        "objects": {"w.safetensors": {"size": 30, "blake3": DIGEST, "chunks": chunks}},
    }


def opened(value: dict[str, Any]) -> WeightsManifest:
    return open_manifest(sign_document(KIND, value, KEY), run="demo", publishers={KEY.public_hex})


def test_what_is_signed_is_what_is_opened() -> None:
    chunk = Chunk(DIGEST, MAX_CHUNK_BYTES)
    made = ObjectInfo(2 * chunk.size, DIGEST, (chunk, chunk))
    tensor = {"t" * 512: {"dtype": "d" * 32, "shape": [2**44] * 16, "blake3": DIGEST}}
    objects, delta = {"x" * 200: made}, {"w.delta": made}
    manifest = WeightsManifest("demo", 2**31 - 1, 0, None, tensor, ("w",), objects, delta)
    data = sign_manifest(manifest, KEY)
    assert open_manifest(data, run="demo", publishers={KEY.public_hex}) == manifest
    assert manifest.chunks() == {DIGEST: chunk}
    assert (manifest.is_anchor, manifest.rebuilt_from) == (False, 0)
    assert opened(payload()).is_anchor
    for keys, run in (({"00" * 32}, "demo"), (None, "other")):
        with pytest.raises(BadSignature, match=r"may not sign it|of run 'demo', not 'other'"):
            open_manifest(data, run=run, publishers=keys)


W = ["objects", "w.safetensors"]


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (["version"], -1, "version"),
        (["version"], True, "version"),
        (["version"], 2**31, "version"),
        (["base"], 3, "base must be an older"),
        (["base"], -1, "base must be an older"),
        (["run"], "other", "of run 'other'"),
        (["model_digest"], "x", "model_digest"),
        (["objects"], {}, "neither whole nor a delta"),
        (["objects"], [], f"objects must be at most {MAX_OBJECTS} named files"),
        (["base"], 2, "a base needs a delta"),
        (["delta"], {"x": {"size": 0, "blake3": DIGEST, "chunks": []}}, "and a delta a base"),
        (["files"], ["w.safetensors", "other.safetensors"], "neither whole"),
        (["files"], ["../x"], "safe names"),
        (["files"], ["w.safetensors"] * 2, "none twice"),
        (["files"], {}, f"files must be at most {MAX_OBJECTS} names"),
        (["files"], [f"{n}" for n in range(MAX_OBJECTS + 1)], f"at most {MAX_OBJECTS} names"),
        (["extra"], 1, "fields"),
        (["extra"], "a\\b", "plain ASCII"),
        (["extra"], "\N{SNOWMAN}", "plain ASCII"),
        (["extra"], 10**17, "a number is too long"),
        (["extra"], [-(10**17)], "a number is too long"),
        (["tensors"], [], "named records"),
        (["tensors", "w"], {}, "must have dtype, shape, blake3"),
        (["tensors", "w", "dtype"], "x" * 33, "dtype"),
        (["tensors", "w", "shape"], [1] * 17, "shape"),
        (["tensors", "w", "shape"], [2**44 + 1], "shape"),
        (["tensors", "w", "shape"], [-1], "shape"),
        (["tensors", "w", "blake3"], DIGEST.upper(), "blake3"),
        (["tensors", "x" * 513], {}, "1 to 512"),
        (W, {"size": 1}, "must have size, blake3, chunks"),
        ([*W, "size"], 31, "add up"),
        ([*W, "size"], True, "size or blake3"),
        ([*W, "blake3"], "x", "size or blake3"),
        ([*W, "chunks"], {}, "chunks must be a list"),
        ([*W, "chunks", 0], [], "a chunk must have"),
        ([*W, "chunks", 1, "blake3"], DIGEST, "has two sizes"),
        ([*W, "chunks", 0, "size"], 0, "malformed"),
        ([*W, "chunks", 0, "size"], MAX_CHUNK_BYTES + 1, "malformed"),
        ([*W, "chunks", 0, "blake3"], "../../etc/passwd", "malformed"),
        *((["objects", name], payload()["objects"][W[1]], "safe file|plain A") for name in UNSAFE),
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


def test_files_that_hold_the_tensors_are_all_there_or_none() -> None:
    changed = payload() | {"base": 2, "files": ["w.safetensors", "more.safetensors"]}
    changed["delta"] = {"x": changed["objects"]["w.safetensors"]}
    with pytest.raises(BadSignature, match="only some of the files"):
        opened(changed)
    changed["objects"] = {"config.json": changed["objects"]["w.safetensors"]}
    assert not opened(changed).is_anchor


def test_more_values_than_any_honest_manifest_has_are_refused_unparsed() -> None:
    for unit in (b"[],", b"{},", b"0,"):
        data = unit * (MAX_BYTES // len(unit))
        with pytest.raises(BadSignature, match=f"{len(data)} bytes with .* values are too much"):
            open_manifest(data, run="demo", publishers=None)
    with pytest.raises(BadSignature, match="are too much"):
        open_manifest(b"x" * (MAX_BYTES + 1), run="demo", publishers=None)
    for data in (b"x" * MAX_BYTES, b"," * MAX_VALUES):
        with pytest.raises(BadSignature, match="not a signed document"):
            open_manifest(data, run="demo", publishers=None)


@pytest.mark.nightly
def test_two_terabytes_of_weights_have_a_manifest() -> None:
    chunks = tuple(Chunk(f"{i:064x}", 16 * 2**20) for i in range(2 * 10**12 // (16 * 2**20)))
    record = {"dtype": "bfloat16", "shape": [5120, 5120], "blake3": DIGEST}
    tensors = {f"model.layers.{i}.mlp.experts.down_proj.weight": record for i in range(20_000)}
    files = tuple(f"model-{i:05d}-of-00500.safetensors" for i in range(500))
    parts = [chunks[i * len(chunks) // 500 : (i + 1) * len(chunks) // 500] for i in range(500)]
    objects = {
        name: ObjectInfo(sum(c.size for c in part), DIGEST, part)
        for name, part in zip(files, parts, strict=True)
    }
    manifest = WeightsManifest("demo", 1, None, DIGEST, tensors, files, objects, {})
    data = sign_manifest(manifest, KEY)
    assert len(data) < MAX_BYTES
    assert open_manifest(data, run="demo", publishers={KEY.public_hex}) == manifest
