"""Final hidden states in an .npy file from outside: mapped, never unpickled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from runspec.core.errors import UserError
from verify.toploc.selection import CHUNK_ROWS, INFINITY, MAGNITUDE

MAX_TOKENS = 1 << 20
MAX_HIDDEN = 1 << 16
_PIECE_ELEMENTS = 1 << 22
_MAGIC = b"\x93NUMPY\x01\x00"
_DTYPES = {"<u2", ">u2", "<f4", ">f4"}
_SAVE = "save it with numpy.save as uint16 (bf16 bits) or float32, [tokens, hidden]"


def open_activations(path: Path) -> np.ndarray:
    """Maps the activations of one rollout.

    Args:
        path: an .npy file of version 1.0: uint16 (bf16 bits) or float32, [n, D], either order.

    Returns:
        The array as it lies in the file, read-only; nothing of it is in memory yet.

    Raises:
        UserError: no such file, or one of another kind, dtype, shape or size.
    """
    if not path.is_file():  # a pipe without a writer would be waited for
        raise UserError("is not a file that can be read", place=str(path), remedy=_SAVE)
    try:
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:  # later versions may announce a header of 4 GB
                raise ValueError("does not begin as an .npy file of version 1.0")
        found = np.lib.format.open_memmap(path, mode="r")
        found_bytes = found.offset + found.nbytes
        if found_bytes != path.stat().st_size:
            raise ValueError(f"its header gives {found_bytes} bytes")
        if found.dtype.str not in _DTYPES:
            raise ValueError(f"has elements of dtype {found.dtype.str}")
        most = MAX_TOKENS, MAX_HIDDEN
        if found.ndim != 2 or not all(0 < n <= m for n, m in zip(found.shape, most, strict=True)):
            raise ValueError(
                f"has the shape {list(found.shape)}; 1 to {MAX_TOKENS} tokens of 1 to {MAX_HIDDEN} "
                "activations are taken"
            )
    except Exception as error:  # numpy raises many kinds at a damaged header
        raise UserError(
            f"cannot be used: {getattr(error, 'strerror', None) or str(error)[:200]}",
            place=str(path),
            remedy=_SAVE,
        ) from error
    return found


def bf16_pieces(activations: np.ndarray, *, place: str) -> Iterator[np.ndarray]:
    """The bf16 bits, u16 [rows, D], some whole chunks at a time, so that memory is bounded.

    Args:
        activations: of `open_activations`; float32 is rounded to the nearest, ties to even.
        place: names the file in errors.

    Raises:
        UserError: an activation is not finite, or not once rounded.
    """
    chunk = CHUNK_ROWS * activations.shape[1]
    rows = CHUNK_ROWS * max(1, _PIECE_ELEMENTS // chunk)
    for start in range(0, len(activations), rows):
        piece = np.ascontiguousarray(activations[start : start + rows])
        bits = piece.astype(np.uint16) if piece.dtype.kind == "u" else round_to_bf16(piece)
        wrong = (bits & MAGNITUDE) >= INFINITY
        if wrong.any():
            row, column = np.argwhere(wrong)[0]
            raise UserError(
                f"row {start + row}, column {column} is not finite in bf16: {piece[row, column]}",
                place=place,
                remedy="no proof is made of a forward pass that overflowed: find out why it did",
            )
        yield bits


def round_to_bf16(values: np.ndarray) -> np.ndarray:
    """Bits, u16, of the nearest bf16, ties to even; of a NaN those of a NaN."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    even = (bits >> 16) & 1
    rounded = (bits + (np.uint32(0x7FFF) + even)) >> 16
    return np.where(np.isnan(values), np.uint32(0x7FC0), rounded).astype(np.uint16)
