"""The manifest's parser against valid, damaged and invented manifests."""

from __future__ import annotations

import resource
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

from broadcast.manifest import (
    KIND,
    MAX_BYTES,
    MAX_CHUNK_BYTES,
    MAX_MEMORY,
    MAX_VALUES,
    Chunk,
    ObjectInfo,
    WeightsManifest,
    open_manifest,
    sign_manifest,
)
from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, sign_document

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
        (["extra"], "two words", "plain ASCII"),
        (["extra"], "a\\b", "plain ASCII"),
        (["extra"], "\N{SNOWMAN}", "plain ASCII"),
        (["extra"], 10**17, "a number is too long"),
        (["extra"], [-(10**17)], "a number is too long"),
        (["tensors", "w", "dtype"], "x" * 33, "dtype"),
        (["tensors", "w", "shape"], [1] * 17, "shape"),
        (["tensors", "w", "shape"], [2**44 + 1], "shape"),
        (["tensors", "x" * 513], {}, "1 to 512"),
        (["objects", "model.safetensors", "chunks", 1, "blake3"], DIGEST, "has two sizes"),
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


def test_files_that_hold_the_tensors_are_all_there_or_none() -> None:
    changed = payload() | {"base": 2, "files": ["model.safetensors", "more.safetensors"]}
    changed["delta"] = {"x": changed["objects"]["model.safetensors"]}
    with pytest.raises(BadSignature, match="only some of the files"):
        opened(changed)
    changed["objects"] = {"config.json": changed["objects"]["model.safetensors"]}
    assert not opened(changed).is_anchor


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/passwd", "a/b", "", ".hidden", "manifest.json", "x" * 201, "a\x00b", "a\n", "é"],
)
def test_unsafe_names_are_refused(name: str) -> None:
    changed = payload()
    changed["objects"][name] = changed["objects"].pop("model.safetensors")
    with pytest.raises(BadSignature, match=r"not a safe file name|plain ASCII"):
        opened(changed)


def dense(unit: bytes, values: int, around: bytes = b"[]") -> bytes:
    """An envelope full of numbered copies of a value that counts as so many."""
    count = min((MAX_BYTES - 1000) // (len(unit % 0) + 5), (MAX_VALUES - 100) // values)
    body = around[:1] + b",".join(unit % i for i in range(count)) + around[1:]
    head = b'{"algorithm":"ed25519","key":"' + b"1" * 64 + b'","kind":"weights","payload":{"x":'
    return head + body + b'},"signature":"' + b"0" * 128 + b'"}'


DENSE = {
    "keys of one object": (b'"%017d":0', 1, b"{}"),
    "objects of one key": (b'{"%08d":0}', 2),
    "nested lists": (b"[" * 20 + b"%d" + b"]" * 20, 21),
    "numbers": (b"%d.1234567890123", 1),
}


def memory_of(name: str) -> int:
    """Opens dense bytes; by how many bytes this process then had grown at its peak."""
    data = dense(*DENSE[name])
    assert 10**6 < len(data) <= MAX_BYTES
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadSignature):
        open_manifest(data, run="demo", publishers=None)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_no_bytes_take_more_memory_than_is_stated(name: str) -> None:
    # a fresh process: what others of these tests have freed would hide what this one takes
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(memory_of, name).result() < MAX_MEMORY


def test_more_values_than_any_honest_manifest_has_are_refused_unparsed() -> None:
    for unit in (b"[],", b"{},", b"0,"):
        with pytest.raises(BadSignature, match="values are too much"):
            open_manifest(unit * (MAX_BYTES // len(unit)), run="demo", publishers=None)
    with pytest.raises(BadSignature, match="are too much"):
        open_manifest(b"x" * (MAX_BYTES + 1), run="demo", publishers=None)


@pytest.mark.slow
def test_two_terabytes_of_weights_have_a_manifest() -> None:
    chunks = tuple(Chunk(f"{i:064x}", 16 * 2**20) for i in range(2 * 10**12 // (16 * 2**20)))
    record = {"dtype": "bfloat16", "shape": [5120, 5120], "blake3": DIGEST}
    tensors = {f"model.layers.{i}.mlp.experts.down_proj.weight": record for i in range(20_000)}
    files = tuple(f"model-{i:05d}-of-00500.safetensors" for i in range(500))
    objects = {
        name: ObjectInfo(sum(c.size for c in part), DIGEST, part)
        for i, name in enumerate(files)
        for part in [chunks[i * len(chunks) // 500 : (i + 1) * len(chunks) // 500]]
    }
    manifest = WeightsManifest("demo", 1, None, DIGEST, tensors, files, objects, {})
    data = sign_manifest(manifest, KEY)
    assert len(data) < MAX_BYTES
    assert open_manifest(data, run="demo", publishers={KEY.public_hex}) == manifest
