"""The weights manifest: signed digests of every file and tensor of a policy version."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from broadcast.layout import is_run, is_version
from runspec.core.canonical import is_digest
from runspec.core.files import read_bounded
from runspec.core.signed import BadSignature, SigningKey, open_document, sign_document

KIND = "weights"
FILE_NAME = "manifest.json"
"""Name of the signed manifest in a fetched version's directory."""
MAX_BYTES = 16 * 1024 * 1024
"""Largest signed manifest: enough for 2 TB of weights in 16 MiB chunks, 12 TB in larger chunks."""
MAX_VALUES = 700_000
"""Most JSON values in a manifest. The densest honest manifest has 25 bytes for each value."""
MAX_MEMORY = 256 * 1024 * 1024
"""Most memory that `open_manifest` may need for any input, besides the input itself."""
MAX_CHUNK_BYTES = 64 * 1024 * 1024
MAX_OBJECTS = 10_000
_MAX_DIMENSIONS = 16
_MAX_DIMENSION = 2**44
_TENSOR_NAME = re.compile(r"[!-~]{1,512}")
_NOT_PLAIN = re.compile(rb"[\x00-\x20\\\x7f]")
_LONG_NUMBER = re.compile(rb"[:,\[]-?[0-9]{18}")
_DTYPE = re.compile(r"[A-Za-z0-9_]{1,32}")
_OBJECT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_FIELDS = {"run", "version", "base", "model_digest", "tensors", "files", "objects", "delta"}


@dataclass(frozen=True)
class Chunk:
    """A piece of a file; `blake3` is its name in the store."""

    blake3: str
    size: int


@dataclass(frozen=True)
class ObjectInfo:
    """One file of a version, as its chunks in order."""

    size: int
    blake3: str
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True)
class WeightsManifest:
    """The contents of one version of a run."""

    run: str
    version: int
    base: int | None
    """The version that the delta is applied to; None if there is no delta."""
    model_digest: str | None
    """One digest of all weights (`bridge.tensors.model_digest`); None if none was given."""
    tensors: dict[str, dict[str, Any]]
    """Record {dtype, shape, blake3} of each tensor, from the bridge's `tensors.json`."""
    files: tuple[str, ...]
    """Names of the files that hold the tensors."""
    objects: dict[str, ObjectInfo]
    """The files of the version by name; if it is no anchor, without those in `files`."""
    delta: dict[str, ObjectInfo]
    """Delta files, which turn the base's `files` into this version's; empty without a base."""

    @property
    def is_anchor(self) -> bool:
        """Whether the objects are the whole version, so that no older version is needed."""
        return self.objects.keys() >= set(self.files)

    @property
    def rebuilt_from(self) -> int | None:
        """The older version that a client needs too; None for an anchor."""
        return None if self.is_anchor else self.base

    @property
    def weights_bytes(self) -> int:
        """Size of the files that hold the tensors, of an anchor."""
        return sum(self.objects[name].size for name in self.files)

    @property
    def delta_bytes(self) -> int:
        """Size of the delta; 0 if there is none."""
        return sum(info.size for info in self.delta.values())

    def chunks(self) -> dict[str, Chunk]:
        """Return every distinct chunk by digest: the delta's, then those of the objects."""
        return distinct_chunks([*self.delta.values(), *self.objects.values()])


def distinct_chunks(infos: Iterable[ObjectInfo]) -> dict[str, Chunk]:
    """Return the chunks of some files by digest, in order, without repetitions."""
    return {chunk.blake3: chunk for info in infos for chunk in info.chunks}


def is_object_name(name: object) -> bool:
    """Return whether a file may have this name: plain, without folder, not the manifest's."""
    return isinstance(name, str) and _OBJECT_NAME.fullmatch(name) is not None and name != FILE_NAME


def sign_manifest(manifest: WeightsManifest, key: SigningKey) -> bytes:
    """Return the signed manifest; leases and latest.json name it by its BLAKE3."""
    return sign_document(KIND, asdict(manifest), key)


def open_manifest(data: bytes, *, run: str, publishers: Collection[str] | None) -> WeightsManifest:
    """Check an untrusted manifest and return it.

    Args:
        data: the signed bytes.
        run: the only run accepted.
        publishers: keys that may sign it; None accepts any key, for manifests on one's own disk.

    Raises:
        BadSignature: not signed by a publisher, of another run, malformed, or beyond a limit.
    """
    payload = _payload(data, publishers)
    if set(payload) != _FIELDS:
        raise BadSignature(f"weights: fields {sorted(payload)} instead of {sorted(_FIELDS)}")
    if payload["run"] != run:
        raise BadSignature(f"weights: of run {str(payload['run'])[:80]!r}, not {run!r}")
    version, base = payload["version"], payload["base"]
    if not is_run(run) or not is_version(version):
        raise BadSignature("weights: run or version is malformed")
    if base is not None and not (is_version(base) and base < version):
        raise BadSignature("weights: base must be an older version")
    if (digest := payload["model_digest"]) is not None and not is_digest(digest):
        raise BadSignature("weights: model_digest is not a digest")
    manifest = WeightsManifest(
        run=run,
        version=version,
        base=base,
        model_digest=digest,
        tensors=_tensors(payload["tensors"]),
        files=_files(payload["files"]),
        objects=_objects("objects", payload["objects"]),
        delta=_objects("delta", payload["delta"]),
    )
    if (base is None) != (not manifest.delta):
        raise BadSignature("weights: a base needs a delta, and a delta a base")
    if not manifest.objects or not (manifest.is_anchor or manifest.delta):
        raise BadSignature("weights: neither whole nor a delta")
    if not manifest.is_anchor and not manifest.objects.keys().isdisjoint(manifest.files):
        raise BadSignature("weights: only some of the files that hold the tensors")
    sizes: dict[str, int] = {}
    for info in (*manifest.objects.values(), *manifest.delta.values()):
        for chunk in info.chunks:
            if sizes.setdefault(chunk.blake3, chunk.size) != chunk.size:
                raise BadSignature(f"weights: chunk {chunk.blake3[:16]} has two sizes")
    return manifest


def read_manifest(directory: Path) -> WeightsManifest:
    """Return the manifest of a version that `WeightsClient.fetch` fetched and checked."""
    data = read_bounded(directory / FILE_NAME, MAX_BYTES)
    return open_manifest(data, run=_payload(data, None).get("run", ""), publishers=None)


def _payload(data: bytes, publishers: Collection[str] | None) -> dict[str, Any]:
    """Return the signed payload; refuse data that would need much memory or time to parse."""
    values = sum(data.count(sign) for sign in (b",", b"[", b"{"))
    if len(data) > MAX_BYTES or values > MAX_VALUES:
        raise BadSignature(f"weights: {len(data)} bytes with {values} values are too much")
    # A character beyond ASCII multiplies the memory of its string. No valid name has a blank.
    if not data.isascii() or _NOT_PLAIN.search(data):
        raise BadSignature("weights: plain ASCII without blanks and escapes is needed")
    if _LONG_NUMBER.search(data):
        raise BadSignature("weights: a number is too long")
    return open_document(data, kind=KIND, keys=publishers, max_bytes=MAX_BYTES).payload


def _tensors(value: object) -> dict[str, dict[str, Any]]:
    """Check the form of the tensors' records; the bridge checks their meaning."""
    if not isinstance(value, dict):
        raise BadSignature("weights: tensors must be named records")
    for name, record in value.items():
        shown = f"weights: tensor {name[:200]!r}"
        if _TENSOR_NAME.fullmatch(name) is None:
            raise BadSignature(f"{shown}: a name is 1 to 512 ASCII characters")
        if not isinstance(record, dict) or set(record) != {"dtype", "shape", "blake3"}:
            raise BadSignature(f"{shown} must have dtype, shape, blake3")
        dtype, shape = record["dtype"], record["shape"]
        if not isinstance(dtype, str) or _DTYPE.fullmatch(dtype) is None:
            raise BadSignature(f"{shown}: dtype is malformed")
        if not is_digest(record["blake3"]):
            raise BadSignature(f"{shown}: blake3 is malformed")
        if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
            raise BadSignature(f"{shown}: shape is malformed")
        if not all(type(n) is int and 0 <= n <= _MAX_DIMENSION for n in shape):
            raise BadSignature(f"{shown}: shape is malformed")
    return value


def _files(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_OBJECTS:
        raise BadSignature(f"weights: files must be at most {MAX_OBJECTS} names")
    if not all(is_object_name(name) for name in value) or len(set(value)) != len(value):
        raise BadSignature("weights: files must be safe names, none twice")
    return tuple(value)


def _objects(field: str, value: object) -> dict[str, ObjectInfo]:
    if not isinstance(value, dict) or len(value) > MAX_OBJECTS:
        raise BadSignature(f"weights: {field} must be at most {MAX_OBJECTS} named files")
    return {name: _object(name, info) for name, info in value.items()}


def _object(name: str, value: object) -> ObjectInfo:
    if not is_object_name(name):
        raise BadSignature(f"weights: {name[:200]!r} is not a safe file name")
    if not isinstance(value, dict) or set(value) != {"size", "blake3", "chunks"}:
        raise BadSignature(f"weights: object {name} must have size, blake3, chunks")
    size, digest, chunks = value["size"], value["blake3"], value["chunks"]
    if type(size) is not int or size < 0 or not is_digest(digest):
        raise BadSignature(f"weights: object {name}: size or blake3 is malformed")
    if not isinstance(chunks, list):
        raise BadSignature(f"weights: object {name}: chunks must be a list")
    checked = tuple(_chunk(name, chunk) for chunk in chunks)
    if sum(chunk.size for chunk in checked) != size:
        raise BadSignature(f"weights: object {name}: its chunks do not add up to its size")
    return ObjectInfo(size, digest, checked)


def _chunk(name: str, value: object) -> Chunk:
    if not isinstance(value, dict) or set(value) != {"blake3", "size"}:
        raise BadSignature(f"weights: object {name}: a chunk must have blake3 and size")
    digest, size = value["blake3"], value["size"]
    if not is_digest(digest) or type(size) is not int or not 0 < size <= MAX_CHUNK_BYTES:
        raise BadSignature(f"weights: object {name}: a chunk's blake3 or size is malformed")
    return Chunk(digest, size)
