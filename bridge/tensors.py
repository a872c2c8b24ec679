"""Tensors: dtypes, digests, copies between memory orders, and all of a model as one vector.

The vector has the Hugging Face tensors in the weight map's order. Islands with different meshes
average such vectors, which a `Codec` encodes.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np

from bridge.weight_map import Entry, Path, weight_map
from runspec.core.canonical import canonical_json, digest_bytes
from runspec.core.errors import UserError
from runspec.core.models import ModelConfig

DTYPES: dict[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}
"""The types that versions and checkpoints have, by the name that spec and config.json use."""
_COLUMNS = 256
_ROWS = 256
_PADDING = 8


def dtype_named(name: str) -> np.dtype:
    """The numpy dtype of a name of `DTYPES`; another name is a UserError."""
    try:
        return DTYPES[name]
    except KeyError:
        raise UserError(
            f"dtype {name!r} is not supported", remedy=f"use one of {', '.join(DTYPES)}"
        ) from None


def tensor_bytes(array: np.ndarray) -> memoryview:
    """The little-endian C-order bytes of an array, without a copy where it lies so already."""
    array = contiguous(array)
    if array.dtype.byteorder == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return array.reshape(-1).view(np.uint8).data


def tensor_digest(array: np.ndarray) -> str:
    """BLAKE3 of the tensor's little-endian C-order bytes (shape and dtype are not part of it)."""
    return digest_bytes(tensor_bytes(array))


def record(dtype: np.dtype, shape: tuple[int, ...], digest: str) -> dict[str, Any]:
    """The record of a tensor whose bytes were hashed."""
    return {"dtype": dtype.name, "shape": list(shape), "blake3": digest}


def model_digest(tensors: Mapping[str, Mapping[str, Any]]) -> str:
    """One digest of a whole model: BLAKE3 of the canonical JSON of its tensor records by name."""
    return digest_bytes(canonical_json(dict(tensors)))


def tree_digests(
    flat: Mapping[Path, np.ndarray], config: ModelConfig, dtype: str
) -> dict[str, str]:
    """Digests of a JAX tree's weights as they would be published.

    Args:
        flat: every leaf of the tree by its path, as host arrays.
        config: the model's shape.
        dtype: name of the published type; leaves are cast to it (round to nearest even).

    Returns:
        For each Hugging Face name the digest that a manifest of these weights carries.
    """
    target = dtype_named(dtype)
    digests = {}
    for entry in weight_map(config):
        leaf = flat[entry.path]
        parts = [leaf] if entry.layers is None else list(leaf)
        for name, part in zip(entry.tensor_names(), parts, strict=True):
            digests[name] = tensor_digest(entry.to_hf(part.astype(target, copy=False)))
    return digests


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """target[...] = source, for arrays of one shape and dtype.

    Where one is transposed, numpy alone goes through one of them in steps of whole rows, which fall
    on few lines of the cache. Blocks that go by way of a small buffer, its rows padded, are copied
    three to ten times as fast.
    """
    down, across = _fastest(target), _fastest(source)
    if down == across:
        target[...] = source
        return
    bits = f"u{source.itemsize}"  # bfloat16 itself numpy copies by a call for each number
    target, source = (
        np.moveaxis(array.view(bits), (down, across), (-2, -1)) for array in (target, source)
    )
    rows, columns = source.shape[-2:]
    buffer = np.empty((min(rows, _ROWS), _COLUMNS + _PADDING), source.dtype)
    blocks = [
        (slice(r, r + _ROWS), slice(c, c + _COLUMNS))
        for r in range(0, rows, _ROWS)
        for c in range(0, columns, _COLUMNS)
    ]
    for outer, block in itertools.product(np.ndindex(source.shape[:-2]), blocks):
        part = source[outer][block]
        staged = buffer[: part.shape[0], : part.shape[1]]
        staged[...] = part
        target[outer][block] = staged


def contiguous(array: np.ndarray) -> np.ndarray:
    """The array in C order, itself where it lies so already."""
    if array.flags.c_contiguous:
        return array
    out = np.empty(array.shape, array.dtype)
    copy_into(out, array)
    return out


def _fastest(array: np.ndarray) -> int:
    """The dimension along which neighbours lie nearest; -1 where no dimension has two elements."""
    steps = [
        (abs(s), axis)
        for axis, (n, s) in enumerate(zip(array.shape, array.strides, strict=True))
        if n > 1
    ]
    return min(steps)[1] if steps else -1


class FlatLayout:
    """Where each weight of a model lies in the vector.

    Each tensor lies in C order, one after the other, without gaps.
    """

    size: int
    """n: elements of the vector."""

    def __init__(self, config: ModelConfig) -> None:
        self._parts: list[tuple[Entry, slice]] = []
        self.size = 0
        for entry in weight_map(config):
            end = self.size + math.prod(entry.leaf_shape)
            self._parts.append((entry, slice(self.size, end)))
            self.size = end

    def flatten(
        self, leaves: Mapping[Path, np.ndarray], dtype: np.dtype | type = np.float32
    ) -> np.ndarray:
        """Return the leaves of a tree as one vector.

        Args:
            leaves: every leaf by its path; each is asked for once, in the order of the vector.
            dtype: of the result.

        Returns:
            A new array [n].
        """
        flat = np.empty(self.size, dtype)
        for entry, where in self._parts:
            for target, part in zip(
                self._tensors(entry, flat[where]), _layers(entry, leaves[entry.path]), strict=True
            ):
                target[...] = entry.to_hf(part)
        return flat

    def leaves(self, flat: np.ndarray) -> Iterator[tuple[Path, np.ndarray]]:
        """Yield path and array of each leaf of a vector [n].

        The arrays have the shapes of the JAX tree. They are views where one tensor is the leaf,
        and copies where a leaf has one tensor a layer.
        """
        for entry, where in self._parts:
            parts = [entry.to_tree(tensor) for tensor in self._tensors(entry, flat[where])]
            yield entry.path, parts[0] if entry.layers is None else np.stack(parts)

    @staticmethod
    def _tensors(entry: Entry, flat: np.ndarray) -> np.ndarray:
        """Views of the tensors of a leaf, one for each row of the result."""
        return flat.reshape(entry.layers or 1, *entry.hf_shape)


def _layers(entry: Entry, leaf: np.ndarray) -> np.ndarray:
    """One row for each tensor of a leaf."""
    return leaf[None] if entry.layers is None else leaf


Kind = Literal["float32", "float16", "sparse"]
SEGMENT = 1 << 20
"""Elements that are encoded or decoded at a time: a multiple of every block."""
LARGEST = 64
"""Elements of a block that `sparse` sends."""
_SMALLEST = np.finfo(np.float32).smallest_normal


class MalformedShare(UserError):
    """Error: bytes are not an encoded vector of that length, or a vector is not finite."""


class Codec(ABC):
    """Encodes an island's share, a float32 vector, as few bytes; `codec` returns that of a kind.

    An encoded vector of n elements is one section of scales and one section of values, in the order
    of the elements, little-endian throughout. A scale is a float32 and belongs to a block of
    neighbours:

        kind      block   scale          value                                     bytes an element
        float32   none    none           float32                                   4
        float16   1024    max |x|        float16 of x / scale                      2.004
        sparse    4096    max |x| / 7    the 64 largest |x|, 2 bytes each          0.032

    A value of `sparse` is a uint16: 12 bits of index within the block, then 4 bits of
    x / scale + 8, rounded half to even. Indices rise within a block. Where several |x| are equal,
    the first are taken.

    Every operation is one of IEEE 754 on single elements, so that all platforms decode the same
    bits. Encoding and decoding need memory for the result and for one segment of 2^20 elements.
    """

    kind: Kind
    feedback: float
    """Part of the last share's error that is added to the next share."""

    @abstractmethod
    def size(self, n: int) -> int:
        """Return the bytes of an encoded vector of n elements."""

    @abstractmethod
    def encode(self, x: np.ndarray) -> bytes:
        """Encode a vector.

        Args:
            x: float32 [n].

        Raises:
            MalformedShare: an element is not finite.
        """

    @abstractmethod
    def parts(self, data: bytes | memoryview, n: int) -> Iterator[tuple[slice, np.ndarray]]:
        """Decode a vector segment by segment.

        Args:
            data: of `encode`, from anybody.
            n: elements of the vector.

        Yields:
            Where a segment lies, and its elements, float32; they may not be written to.

        Raises:
            MalformedShare: the length is not `size(n)`, an element would not be finite, or the
                indices of a block do not rise.
        """

    def decode(self, data: bytes | memoryview, n: int) -> np.ndarray:
        """Decode a vector, float32 [n]; arguments and errors are those of `parts`."""
        x = np.empty(n, np.float32)
        for where, values in self.parts(data, n):
            x[where] = values
        return x

    def _check_length(self, data: bytes | memoryview, n: int) -> None:
        if len(data) != self.size(n):
            raise MalformedShare(
                f"a share of {n} elements as {self.kind} has {self.size(n)} bytes, not {len(data)}"
            )


def codec(kind: Kind) -> Codec:
    """Return the codec of a kind."""
    return _CODECS[kind]


class _Float32(Codec):
    kind, feedback = "float32", 0.0

    def size(self, n: int) -> int:
        return 4 * n

    def encode(self, x: np.ndarray) -> bytes:
        for where in segments(len(x)):
            _check_finite(x[where], self.kind)
        return x.astype("<f4", copy=False).tobytes()

    def parts(self, data: bytes | memoryview, n: int) -> Iterator[tuple[slice, np.ndarray]]:
        self._check_length(data, n)
        x = np.frombuffer(data, "<f4").astype(np.float32, copy=False)
        for where in segments(n):
            _check_finite(x[where], self.kind)
            yield where, x[where]


class _Blocks(Codec):
    """A codec with a scale for each block.

    B blocks are an array [B, block]; the last block of a vector is filled up with zeros.
    """

    block: int
    steps: int
    """The largest element in units of the scale."""
    dtype: str
    """Numpy type of the values."""

    def size(self, n: int) -> int:
        return 4 * _blocks(n, self.block) + self._value_bytes(n)

    def encode(self, x: np.ndarray) -> bytes:
        sections: tuple[list[bytes], list[bytes]] = [], []
        for where in segments(len(x)):
            filled = np.pad(x[where], (0, (where.start - where.stop) % self.block))
            blocks = filled.reshape(-1, self.block)
            scales = np.abs(blocks).max(axis=1) / np.float32(self.steps)
            _check_finite(scales, self.kind)
            # A quotient by a subnormal number may be infinite.
            scales[scales < _SMALLEST] = 0
            values = self._encode(blocks, np.where(scales == 0, np.float32(1), scales)[:, None])
            sections[0].append(scales.astype("<f4", copy=False).tobytes())
            data = values.astype(self.dtype, copy=False).tobytes()
            sections[1].append(data[: self._value_bytes(where.stop - where.start)])
        return b"".join(sections[0] + sections[1])

    def parts(self, data: bytes | memoryview, n: int) -> Iterator[tuple[slice, np.ndarray]]:
        self._check_length(data, n)
        all_scales = np.frombuffer(data, "<f4", _blocks(n, self.block))
        all_values = np.frombuffer(data, np.uint8, offset=all_scales.nbytes)
        for where in segments(n):
            count = where.stop - where.start
            scales = all_scales[where.start // self.block :][: _blocks(count, self.block)]
            at, length = self._value_bytes(where.start), self._value_bytes(count)
            full = self._value_bytes(len(scales) * self.block)
            values = np.pad(all_values[at : at + length], (0, full - length))
            with np.errstate(over="ignore", invalid="ignore"):  # refused below
                x = self._decode(
                    scales.astype(np.float32)[:, None],
                    values.view(self.dtype).reshape(len(scales), -1),
                )
            _check_finite(x, self.kind)
            yield where, x.reshape(-1)[:count]

    @abstractmethod
    def _value_bytes(self, n: int) -> int:
        """Bytes of the values of n elements."""

    @abstractmethod
    def _encode(self, x: np.ndarray, scales: np.ndarray) -> np.ndarray:
        """Values of blocks, float32 [B, block], with scales, [B, 1], none of them 0."""

    def _decode(self, scales: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Scales [B, 1] and values of B blocks: their elements, float32 [B, block]."""
        return values.astype(np.float32) * scales


class _Float16(_Blocks):
    kind, feedback, block, steps, dtype = "float16", 0.0, 1024, 1, "<f2"

    def _value_bytes(self, n: int) -> int:
        return 2 * n

    def _encode(self, x: np.ndarray, scales: np.ndarray) -> np.ndarray:
        return (x / scales).astype(np.float16)


class _Sparse(_Blocks):
    kind, feedback, block, steps, dtype = "sparse", 0.95, 4096, 7, "<u2"

    def _value_bytes(self, n: int) -> int:
        return 2 * LARGEST * _blocks(n, self.block)

    def _encode(self, x: np.ndarray, scales: np.ndarray) -> np.ndarray:
        at = _largest(np.abs(x))
        found = np.take_along_axis(x, at, axis=1)
        return at.astype(np.uint16) << 4 | (np.rint(found / scales) + 8).astype(np.uint16)

    def _decode(self, scales: np.ndarray, values: np.ndarray) -> np.ndarray:
        at = values >> 4
        if (at[:, 1:] <= at[:, :-1]).any():
            raise MalformedShare("the indices of a sparse share's block do not rise")
        x = np.zeros((len(values), self.block), np.float32)
        found = ((values & 15).astype(np.float32) - 8) * scales
        np.put_along_axis(x, at.astype(np.intp), found, axis=1)
        return x


_CODECS: dict[Kind, Codec] = {each.kind: each for each in (_Float32(), _Float16(), _Sparse())}


def _largest(size: np.ndarray) -> np.ndarray:
    """Indices of each row's `LARGEST` largest, rising, the first of equal ones: [B, LARGEST].

    By the value of the smallest of them: which of equal ones `argpartition` takes depends on the
    processor.
    """
    least = np.partition(size, -LARGEST, axis=1)[:, -LARGEST, None]
    taken = size >= least
    tied = np.flatnonzero(np.count_nonzero(taken, axis=1) > LARGEST)
    if len(tied):
        above, equal = size[tied] > least[tied], size[tied] == least[tied]
        room = LARGEST - np.count_nonzero(above, axis=1)[:, None]
        taken[tied] = above | (equal & (np.cumsum(equal, axis=1, dtype=np.int32) <= room))
    return np.flatnonzero(taken).reshape(-1, LARGEST) % size.shape[1]


def _blocks(n: int, block: int) -> int:
    return -(-n // block)


def segments(n: int) -> Iterator[slice]:
    """Yield slices of n elements, of at most `SEGMENT` each."""
    return (slice(start, min(start + SEGMENT, n)) for start in range(0, n, SEGMENT))


def _check_finite(x: np.ndarray, kind: Kind) -> None:
    if not np.isfinite(x).all():
        raise MalformedShare(f"a share as {kind} has a number that is not finite")
