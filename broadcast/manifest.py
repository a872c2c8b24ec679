"""The weights manifest: the publisher's signed word on what a policy version is, byte for byte."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from broadcast.layout import is_run, is_version
from runspec.core.files import read_bounded
from runspec.core.hashing import is_digest
from runspec.core.keys import SigningKey
from runspec.core.signed import BadSignature, open_document, sign_document

KIND = "weights"
FILE_NAME = "manifest.json"
"""Name of the signed manifest in a fetched version's directory."""
MAX_BYTES = 16 * 1024 * 1024
"""Of a signed manifest: 2 TB of weights in 16 MiB chunks; never more than 12 TB in larger ones."""
MAX_VALUES = 700_000
"""Of JSON in a manifest. The densest honest one of MAX_BYTES has 25 bytes for each."""
MAX_MEMORY = 256 * 1024 * 1024
"""What opening any bytes as a manifest may take at its peak, those bytes not counted."""
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
    """The version whose `files` the delta turns into this one's; None where there is no delta."""
    model_digest: str | None
    """One digest of all weights (`bridge.tensors.model_digest`); None where none was given."""
    tensors: dict[str, dict[str, Any]]
    """For each tensor {dtype, shape, blake3}, as the bridge's `tensors.json` says."""
    files: tuple[str, ...]
    """Names of the files that hold the tensors: objects, or made from those of `base`."""
    objects: dict[str, ObjectInfo]
    """The files of the version's directory by name; without `files` where it is no anchor."""
    delta: dict[str, ObjectInfo]
    """What `bridge.delta` makes of the base's files this version's with; empty without a base."""

    @property
    def is_anchor(self) -> bool:
        """Whether the objects are the whole version, so that nothing older is needed."""
        return self.objects.keys() >= set(self.files)

    @property
    def rebuilt_from(self) -> int | None:
        """The version that a joiner needs besides; None for an anchor."""
        return None if self.is_anchor else self.base

    def chunks(self) -> dict[str, Chunk]:
        """Every distinct chunk by its digest: the delta's, then the objects' in their order."""
        infos = [*self.delta.values(), *self.objects.values()]
        return {c.blake3: c for info in infos for c in info.chunks}


def is_object_name(name: object) -> bool:
    """Whether a file may have this name: plain, relative, no folder, not the manifest's own."""
    return isinstance(name, str) and _OBJECT_NAME.fullmatch(name) is not None and name != FILE_NAME


def sign_manifest(manifest: WeightsManifest, key: SigningKey) -> bytes:
    """The signed manifest; its BLAKE3 is the manifest digest that leases and latest.json name."""
    return sign_document(KIND, asdict(manifest), key)


def open_manifest(data: bytes, *, run: str, publishers: Collection[str] | None) -> WeightsManifest:
    """Checks a manifest from outside.

    Args:
        data: the signed bytes.
        run: the only run accepted.
        publishers: keys that may sign; None where the signature was checked before (own disk).

    Raises:
        BadSignature: not a publisher's, another run's, malformed, or beyond a bound.
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
    manifest = WeightsManifest(
        run=run,
        version=version,
        base=base,
        model_digest=_model_digest(payload["model_digest"]),
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
    _check_chunks(manifest)
    return manifest


def read_manifest(directory: Path) -> WeightsManifest:
    """The manifest of a version that `WeightsClient.fetch` put there (it was checked then)."""
    data = read_bounded(directory / FILE_NAME, MAX_BYTES)
    return open_manifest(data, run=_payload(data, None).get("run", ""), publishers=None)


def _payload(data: bytes, publishers: Collection[str] | None) -> dict[str, Any]:
    """The signed payload; what would take much memory or time to parse is refused before."""
    values = sum(data.count(sign) for sign in (b",", b"[", b"{"))
    if len(data) > MAX_BYTES or values > MAX_VALUES:
        raise BadSignature(f"weights: {len(data)} bytes with {values} values are too much")
    # One character that is not ASCII makes all of a string wide; and no honest name has a blank.
    if not data.isascii() or _NOT_PLAIN.search(data):
        raise BadSignature("weights: plain ASCII without blanks and escapes is needed")
    if _LONG_NUMBER.search(data):
        raise BadSignature("weights: a number is too long")
    return open_document(data, kind=KIND, keys=publishers, max_bytes=MAX_BYTES).payload


def _model_digest(value: object) -> str | None:
    if value is not None and not is_digest(value):
        raise BadSignature("weights: model_digest is not a digest")
    return value  # type: ignore[return-value]


def _tensors(value: object) -> dict[str, dict[str, Any]]:
    """Their meaning is the bridge's; here only the form is held: records with a digest."""
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


def _check_chunks(manifest: WeightsManifest) -> None:
    """A digest names the same bytes wherever it stands."""
    sizes: dict[str, int] = {}
    for info in (*manifest.objects.values(), *manifest.delta.values()):
        for chunk in info.chunks:
            if sizes.setdefault(chunk.blake3, chunk.size) != chunk.size:
                raise BadSignature(f"weights: chunk {chunk.blake3[:16]} has two sizes")
