"""A delta file: magic, header, one block a tensor.

    8 bytes  magic
    u32      length of the header, little-endian
    header   canonical JSON {base, target, layout, tensors: {name: {blake3, bytes}}}
    blocks   of the tensors in the order of the weights file, `bytes` long each, nothing after them

`base` and `target` are model digests, `layout` that of the weights file's header, `blake3` the
digest of the tensor as the target has it. A block is the coded segments of the tensor
(`bridge.delta.segments`), one after the other.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.safetensors_io import listed
from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.hashing import is_digest

MAGIC = b"RSDELTA\x01"
SUFFIX = ".delta"
_LENGTH = 4
_MAX_BLOCK_BYTES = 2**48


@dataclass(frozen=True)
class DeltaTensor:
    """The header's entry of one tensor."""

    blake3: str
    """BLAKE3 of the tensor in the target."""
    nbytes: int
    """Bytes of its block."""


@dataclass(frozen=True)
class DeltaHeader:
    """The header of a delta file."""

    base: str
    """Model digest of the version that the delta is applied to."""
    target: str
    """Model digest of what comes of it."""
    layout: str
    """Digest of the weights file's own header, which base and target share."""
    tensors: dict[str, DeltaTensor]

    def encode(self) -> bytes:
        """The file's bytes before the first block."""
        tensors = {n: {"blake3": t.blake3, "bytes": t.nbytes} for n, t in self.tensors.items()}
        text = canonical_json({**vars(self), "tensors": tensors})
        return MAGIC + len(text).to_bytes(_LENGTH, "little") + text


@dataclass(frozen=True)
class DeltaFile:
    """A delta file whose header has been read and agrees with the file's size."""

    path: Path
    header: DeltaHeader
    start: int
    """Offset of the first block."""


def read_delta_file(path: Path, names: Collection[str]) -> DeltaFile:
    """Reads the header of a delta file, and checks its lengths against the file's.

    Args:
        path: of the file.
        names: of the tensors that it must be about; they bound how much is read.

    Raises:
        UserError: unreadable, about other tensors, or no delta file from first byte to last.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            fixed = file.read(len(MAGIC) + _LENGTH)
            length = int.from_bytes(fixed[len(MAGIC) :], "little")
            if not fixed.startswith(MAGIC) or len(fixed) + length > size:
                raise MalformedJson("it does not begin as one")
            if len(fixed) + length > _longest(names):
                raise MalformedJson(f"a header of {length} bytes for {len(names)} tensors")
            header = _header(file.read(length), _longest(names))
    except (OSError, MalformedJson) as error:
        raise UserError(f"not a delta of these weights: {error}", place=str(path)) from error
    if header.tensors.keys() != set(names):
        odd = listed(header.tensors.keys() ^ set(names))
        raise UserError(f"a delta of other tensors: {odd[:500]}", place=str(path))
    start = len(fixed) + length
    if start + sum(tensor.nbytes for tensor in header.tensors.values()) != size:
        raise UserError("a delta file that is cut off or too long", place=str(path))
    return DeltaFile(path, header, start)


def _longest(names: Collection[str]) -> int:
    """Bytes that precede the blocks of a delta file of these tensors, at most."""
    none = "0" * 64
    tensors = dict.fromkeys(names, DeltaTensor(none, _MAX_BLOCK_BYTES))
    return len(DeltaHeader(none, none, none, tensors).encode())


def _header(text: bytes, max_bytes: int) -> DeltaHeader:
    fields = parse_object(text, max_bytes=max_bytes)
    if canonical_json(fields) != text:
        raise MalformedJson("its header is not in canonical form")
    if set(fields) != {"base", "target", "layout", "tensors"}:
        raise MalformedJson(f"its header has the fields {sorted(fields)}"[:200])
    if not all(is_digest(fields[name]) for name in ("base", "target", "layout")):
        raise MalformedJson("base, target and layout must be digests")
    if not isinstance(fields["tensors"], dict):
        raise MalformedJson("tensors must be named records")
    tensors = {name: _tensor(name, record) for name, record in fields["tensors"].items()}
    return DeltaHeader(fields["base"], fields["target"], fields["layout"], tensors)


def _tensor(name: str, record: Any) -> DeltaTensor:
    if not isinstance(record, dict) or set(record) != {"blake3", "bytes"}:
        raise MalformedJson(f"tensor {name[:200]!r} must have blake3 and bytes")
    digest, nbytes = record["blake3"], record["bytes"]
    if not is_digest(digest) or type(nbytes) is not int or not 0 <= nbytes < _MAX_BLOCK_BYTES:
        raise MalformedJson(f"tensor {name[:200]!r}: blake3 or bytes is malformed")
    return DeltaTensor(digest, nbytes)
