"""Final hidden states in an .npy file from outside: mapped, never unpickled, nothing evaluated."""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from runspec.core.errors import UserError
from verify.toploc.selection import CHUNK_ROWS, INFINITY, MAGNITUDE

MAX_TOKENS = 1 << 20
MAX_HIDDEN = 1 << 16
_PIECE_ELEMENTS = 1 << 22
_MAX_HEADER_BYTES = 1024
_DTYPES = {"<u2", ">u2", "<f4", ">f4"}
_MAGIC = {b"\x93NUMPY\x01\x00": 2, b"\x93NUMPY\x02\x00": 4, b"\x93NUMPY\x03\x00": 4}
"""Of each version of the format, the bytes that its header's length takes."""
_HEADER = re.compile(
    rb"\{ *'descr': *'([<>|=]?[A-Za-z]\d{0,4})', *'fortran_order': *(True|False), *"
    rb"'shape': *\(((?:\d{1,18}(?:, *\d{1,18}){0,7},? *)?)\),? *\} *\n?"
)
_SAVE = "save it with numpy.save as uint16 (bf16 bits) or float32, [tokens, hidden]"


def open_activations(path: Path) -> np.ndarray:
    """Maps the activations of one rollout.

    Args:
        path: an .npy file of format 1 to 3: uint16 (bf16 bits) or float32, [n, D], either order.

    Returns:
        The array as it lies in the file, read-only; nothing of it is in memory yet.

    Raises:
        UserError: no such file, another kind of file, dtype or shape, or not of the size that its
            header says.
    """
    try:
        # O_NONBLOCK: a pipe without a writer would be waited for.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise UserError(
            f"cannot be read: {getattr(error, 'strerror', None) or error}",
            place=str(path),
            remedy="name an .npy file that may be read",
        ) from error
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise UserError("is not a regular file", place=str(path), remedy=_SAVE)
    with os.fdopen(descriptor, "rb") as file:
        head = file.read(_MAX_HEADER_BYTES)
        try:
            dtype, order, shape, offset = _read_header(head)
            if math.prod(shape) * dtype.itemsize != status.st_size - offset:
                raise ValueError(
                    f"{status.st_size} bytes instead of the {offset} of the header and those of "
                    f"{dtype.name} {list(shape)}"
                )
        except ValueError as error:
            raise UserError(str(error), place=str(path), remedy=_SAVE) from error
        return np.memmap(file, dtype, mode="r", offset=offset, shape=shape, order=order)


def _read_header(head: bytes) -> tuple[np.dtype, Literal["C", "F"], tuple[int, int], int]:
    """Element type, order, shape and where the elements begin; ValueError says what is wrong."""
    width = _MAGIC.get(head[:8])
    if width is None:
        raise ValueError("does not begin as an .npy file")
    start = 8 + width
    length = int.from_bytes(head[8:start], "little")
    found = _HEADER.fullmatch(head[start : start + length])
    if start + length > len(head) or found is None:
        raise ValueError(f"has an .npy header of {length} bytes that is not understood")
    descr, fortran, numbers = found[1].decode(), found[2] == b"True", found[3].decode()
    if descr not in _DTYPES:
        raise ValueError(f"has elements of dtype {descr} instead of uint16 or float32")
    shape = tuple(int(number) for number in numbers.replace(",", " ").split())
    if len(shape) != 2:
        raise ValueError(f"has the shape {list(shape)} instead of [tokens, hidden]")
    tokens, hidden = shape
    if not (0 < tokens <= MAX_TOKENS and 0 < hidden <= MAX_HIDDEN):
        raise ValueError(
            f"has the shape {[tokens, hidden]}; 1 to {MAX_TOKENS} tokens of 1 to {MAX_HIDDEN} "
            "activations are taken"
        )
    return np.dtype(descr), "F" if fortran else "C", (tokens, hidden), start + length


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
