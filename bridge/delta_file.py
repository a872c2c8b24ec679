"""A delta file: magic, header, one block a tensor.

    8 bytes  magic
    u32      length of the header, little-endian
    header   canonical JSON {base, target, layout, tensors: {name: {blake3, bytes}}}
    blocks   of the tensors in the order of the weights file, `bytes` long each, nothing after them

`base` and `target` are model digests, `layout` that of the weights file's header, `blake3` the
digest of the tensor as the target has it. A block is the coded segments of the tensor,
one after the other.

How one segment of a tensor is coded: unchanged, sparse, or full.

A segment is at most `SEGMENT_ELEMENTS` elements, so that what coding and decoding hold in memory
does not grow with a tensor. Coded, it is one byte of kind and

- unchanged: nothing more;
- sparse: u32 `changed`, u32 `symbols`, u8 `shift`; a stream [symbols] of gaps; where `shift` is not
  0 a stream [changed] of their low bits; a stream for each byte plane of the new values [changed],
  the highest first;
- full: a stream for each byte plane of all elements, the highest first.

A gap is the number of unchanged elements before a changed one. Its `shift` low bits are in the
stream of low bits; the rest is a byte, after a byte 255 for each 255 of it. Without the shift, gaps
far above 255 would be many such bytes, each of which costs a bit or more.

A stream is its u32 stored length and its bytes: as they are where the length is the stream's own,
else one zstd frame. All integers are little-endian.
"""

from __future__ import annotations

import mmap
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import zstandard

from bridge.safetensors_io import TensorInfo, listed
from runspec.core.canonical import MalformedJson, canonical_json, is_digest, parse_object
from runspec.core.errors import UserError

SEGMENT_ELEMENTS = 2**21
UNCHANGED, SPARSE, FULL = range(3)
_SKIP = 255
"""The gap byte for 255 unchanged elements and no changed one."""
_MAX_SHIFT = 8
_LEVEL = 1
"""Level of zstd. The streams repeat nothing: higher levels give the same size and are slower."""
_MAX_WINDOW_BYTES = 2**23
_U32 = 4
MAGIC = b"RSDELTA\x01"
SUFFIX = ".delta"
_LENGTH = 4
_MAX_BLOCK_BYTES = 2**48
# Linux: all pages at once. Written ones would come one a fault; read ones come by sixteen, and not
# while Python's lock is held.
_POPULATE = getattr(mmap, "MAP_POPULATE", 0)
_WORD = np.dtype("<u8")
_BLOCK_WORDS = 2**17
"""A megabyte of each side: what is compared is still in the cache when it is looked up."""
_FEW = 1 / 16
"""Share of words that differ above which it is quicker to compare all elements (measured)."""


class MalformedSegment(ValueError):
    """Bytes that are not the coded form of a segment."""


def encode(new: np.ndarray, changed: np.ndarray) -> bytes:
    """Codes a segment in the shorter of the forms.

    Args:
        new: [n] of the new bits, uint16 or uint32, n at most `SEGMENT_ELEMENTS`.
        changed: [changed] ascending indices of what differs from the base.
    """
    if not len(changed):
        return bytes([UNCHANGED])
    gaps = np.diff(changed, prepend=-1) - 1
    shift = _shift(gaps)
    symbols = _symbols(gaps >> shift)
    low_bits = [(gaps & (1 << shift) - 1).astype(np.uint8)] if shift else []
    streams = [symbols, *low_bits, *_planes(new[changed])]
    counts = _u32(len(changed)) + _u32(len(symbols)) + bytes([shift])
    sparse = b"".join([bytes([SPARSE]), counts, *map(_stream, streams)])
    # A full segment costs the compression of all elements, and wins only where most have changed.
    if len(changed) < len(new) // 8:
        return sparse
    full = b"".join([bytes([FULL]), *map(_stream, _planes(new))])
    return min(sparse, full, key=len)


def overwrite(target: np.ndarray, coded: memoryview) -> int:
    """Applies the coded segment that `coded` begins with, in place.

    Args:
        target: [n] uint16 or uint32, writable: all elements of the segment.
        coded: the segment, and what follows it.

    Returns:
        How many bytes of `coded` were the segment.

    Raises:
        MalformedSegment: nothing was written.
    """
    reader = _Reader(coded)
    kind = reader.take(1)[0]
    if kind == SPARSE:
        where = _read_indices(reader, len(target))
        target[where] = _read_values(reader, len(where), target.dtype)
    elif kind == FULL:
        target[:] = _read_values(reader, len(target), target.dtype)
    elif kind != UNCHANGED:
        raise MalformedSegment(f"kind {kind}")
    return reader.at


def _u32(number: int) -> bytes:
    return number.to_bytes(_U32, "little")


def _stream(data: np.ndarray) -> bytes:
    raw = data.tobytes()
    packed = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=False).compress(raw)
    stored = packed if len(packed) < len(raw) else raw
    return _u32(len(stored)) + stored


def _shift(gaps: np.ndarray) -> int:
    """Leaves 8 to 16 of a gap in the mean, which tells zstd most; short gaps stay whole."""
    length = (int(gaps.sum()) // len(gaps)).bit_length()
    return min(length - 4, _MAX_SHIFT) if length >= 8 else 0


def _symbols(gaps: np.ndarray) -> np.ndarray:
    skips = gaps // _SKIP
    symbols = np.full(len(gaps) + int(skips.sum()), _SKIP, np.uint8)
    symbols[np.cumsum(skips + 1) - 1] = gaps - skips * _SKIP
    return symbols


def _read_indices(reader: _Reader, elements: int) -> np.ndarray:
    """[changed] intp, below `elements`: what the gaps before an element and the changed elements
    before it add up to. So they ascend strictly, whatever the bytes are.
    """
    changed, symbols, shift = reader.u32(), reader.u32(), reader.take(1)[0]
    most = changed + elements // _SKIP
    if not (0 < changed <= elements and changed <= symbols <= most and shift <= _MAX_SHIFT):
        raise MalformedSegment(f"{changed} changes, {symbols} gaps, shift {shift} in {elements}")
    gaps = reader.stream(symbols)
    ends = gaps != _SKIP
    where = np.cumsum(gaps, dtype=np.intp)[ends]
    if len(where) != changed or not ends[-1]:
        raise MalformedSegment(f"gaps of {len(where)} elements instead of {changed}")
    if shift:
        where <<= shift
        low_bits = reader.stream(changed)
        if low_bits.max() >> shift:
            raise MalformedSegment(f"more than {shift} low bits")
        where += np.cumsum(low_bits, dtype=np.intp)
    where += np.arange(changed)
    if where[-1] >= elements:
        raise MalformedSegment(f"element {where[-1]} of {elements}")
    return where


def _planes(values: np.ndarray) -> list[np.ndarray]:
    return [(values >> 8 * byte).astype(np.uint8) for byte in reversed(range(values.itemsize))]


def _read_values(reader: _Reader, count: int, dtype: np.dtype) -> np.ndarray:
    values = np.empty((count, dtype.itemsize), np.uint8)
    for byte in reversed(range(dtype.itemsize)):
        values[:, byte] = reader.stream(count)
    return values.reshape(-1).view(dtype)


class _Reader:
    """Takes the parts of a segment one after the other; what is not there is malformed."""

    def __init__(self, data: memoryview) -> None:
        self._data, self.at = data, 0

    def take(self, size: int) -> memoryview:
        if size > len(self._data) - self.at:
            raise MalformedSegment("cut off")
        self.at += size
        return self._data[self.at - size : self.at]

    def u32(self) -> int:
        return int.from_bytes(self.take(_U32), "little")

    def stream(self, size: int) -> np.ndarray:
        """[size] bytes; allocates no more than that, whatever a frame says of itself."""
        stored = self.u32()
        if stored > size:
            raise MalformedSegment(f"{stored} bytes stored for a stream of {size}")
        data = self.take(stored)
        return np.frombuffer(data if stored == size else _unpack(data, size), np.uint8)


def _unpack(data: memoryview, size: int) -> bytes:
    try:
        frame = zstandard.get_frame_parameters(data)
        if frame.content_size != size or frame.window_size > _MAX_WINDOW_BYTES:
            raise MalformedSegment(
                f"a frame of {frame.content_size} bytes and a window of {frame.window_size} where "
                f"{size} bytes belong"
            )
        unpacked = zstandard.ZstdDecompressor().decompress(
            data, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise MalformedSegment(f"not a whole zstd frame: {error}") from error
    if len(unpacked) != size:
        raise MalformedSegment(f"{len(unpacked)} bytes where {size} belong")
    return unpacked


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


def tensor_segments(info: TensorInfo) -> list[slice]:
    """Where in its file the segments of a tensor lie, in bytes."""
    step, end = SEGMENT_ELEMENTS * info.dtype.itemsize, info.offset + info.nbytes
    return [slice(at, min(at + step, end)) for at in range(info.offset, end, step)]


def mapped_bits(
    file: IO[bytes], info: TensorInfo, cut: slice, *, writable: bool = False
) -> np.ndarray:
    """[elements] bits of a tensor's part as they lie in its file, without a copy.

    Args:
        file: open, for writing too where `writable`.
        info: the tensor.
        cut: which bytes of the file.
        writable: what is written to the array is written to the file.

    Raises:
        UserError: it cannot be mapped, as where the file has become shorter.
    """
    dtype = np.dtype(f"<u{info.dtype.itemsize}")
    if cut.start == cut.stop:  # nothing cannot be mapped
        return np.empty(0, dtype)
    before = cut.start % mmap.ALLOCATIONGRANULARITY
    try:
        pages = mmap.mmap(
            file.fileno(),
            cut.stop - cut.start + before,
            flags=mmap.MAP_SHARED | (_POPULATE if writable else 0),
            prot=mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0),
            offset=cut.start - before,
        )
    except (OSError, ValueError) as error:
        raise UserError(
            f"tensor {info.name}: cannot be mapped: {error}", place=file.name
        ) from error
    return np.frombuffer(pages, dtype, offset=before)


def changed_indices(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Indices of the elements whose bits differ, ascending.

    Compares eight bytes at a time and looks for elements only in the words that differ.

    Args:
        old, new: [n] of the same unsigned type of 2 or 4 bytes.

    Returns:
        [changed] intp.
    """
    per_word = _WORD.itemsize // old.itemsize
    whole = len(old) - len(old) % per_word
    step = _BLOCK_WORDS * per_word
    found = [
        _changed_in_words(old[at : min(at + step, whole)], new[at : min(at + step, whole)]) + at
        for at in range(0, whole, step)
    ]
    found.append(np.flatnonzero(old[whole:] != new[whole:]) + whole)
    return np.concatenate(found)


def _changed_in_words(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    old_words, new_words = old.view(_WORD), new.view(_WORD)
    differs = old_words != new_words
    if np.count_nonzero(differs) > len(differs) * _FEW:
        return np.flatnonzero(old != new)
    words = np.flatnonzero(differs)
    per_word = _WORD.itemsize // old.itemsize
    elements = np.flatnonzero((old_words[words] ^ new_words[words]).view(old.dtype))
    return words[elements // per_word] * per_word + elements % per_word
