"""Weights that are nearly the right ones: with noise on each, or rounded to int8.

What limits are worth shows against these. Only copies are written: the files that they are made
from may be linked to a run's own.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from runspec.core.canonical import parse_object
from runspec.core.errors import UserError
from runspec.core.files import atomic_file
from verify.activations import round_to_bf16

Change = Callable[[np.ndarray, np.random.Generator], np.ndarray]
_MAX_HEADER_BYTES = 64 * 1024 * 1024
_WIDTHS = {"F32": 4, "BF16": 2}


def noise(share: float) -> Change:
    """Every weight times 1 + share z, z standard normal."""

    def change(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        drawn = rng.standard_normal(weights.shape, np.float32)
        return weights * (1.0 + np.float32(share) * drawn)

    return change


def int8(weights: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Matrices rounded to 255 levels of each row's largest; vectors as they are."""
    if weights.ndim < 2:
        return weights
    scale = np.abs(weights).max(axis=-1, keepdims=True) / 127.0
    return np.round(weights / np.where(scale > 0, scale, 1.0)) * scale


def spoil(folder: Path, change: Change) -> None:
    """Changes the weights of every safetensors file of a folder, in the published type.

    Raises:
        UserError: there is none, or one of another form.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError("no safetensors file is there", place=str(folder))
    for path in files:
        try:
            _rewrite(path, change)
        except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
            raise UserError(f"cannot be perturbed: {error}", place=str(path)) from error


def _rewrite(path: Path, change: Change) -> None:
    data = np.memmap(path, np.uint8, mode="r")
    (length,) = struct.unpack("<Q", data[:8].tobytes())
    if length > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes")
    head = data[: 8 + length].tobytes()
    header = parse_object(head[8:].rstrip(), max_bytes=_MAX_HEADER_BYTES)
    tensors = {k: v for k, v in header.items() if k != "__metadata__"}
    # A new file under the old name: what the old one is linked to keeps its bytes.
    with atomic_file(path) as file:
        file.write(head)
        for name, info in sorted(tensors.items(), key=lambda item: item[1]["data_offsets"]):
            begin, end = info["data_offsets"]
            raw = data[8 + length + begin : 8 + length + end]
            rng = np.random.default_rng(zlib.crc32(name.encode()))
            file.write(_changed(raw, info, change, rng))


def _changed(raw: np.ndarray, info: dict, change: Change, rng: np.random.Generator) -> bytes:
    width = _WIDTHS.get(info["dtype"])
    if width is None:
        raise ValueError(f"tensors of {info['dtype']}: versions are published in F32 or BF16")
    if width == 4:
        weights = raw.view("<f4").reshape(info["shape"])
        return change(weights, rng).astype("<f4").tobytes()
    weights = (raw.view("<u2").astype(np.uint32) << 16).view(np.float32).reshape(info["shape"])
    return round_to_bf16(change(weights, rng)).astype("<u2").tobytes()
