"""How one segment of a tensor is coded: unchanged, sparse, or full.

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

import numpy as np
import zstandard

SEGMENT_ELEMENTS = 2**21
UNCHANGED, SPARSE, FULL = range(3)
_SKIP = 255
"""The gap byte for 255 unchanged elements and no changed one."""
_MAX_SHIFT = 8
_LEVEL = 1
"""Level of zstd. The streams repeat nothing: higher levels give the same size and are slower."""
_MAX_WINDOW_BYTES = 2**23
_U32 = 4


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
