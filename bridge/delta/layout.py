"""How the weights of a directory lie in its files: what base and target of a delta share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bridge.safetensors_io import TensorInfo, read_headers
from bridge.tensors import dtype_name
from runspec.common.errors import UserError
from runspec.common.hashing import digest_bytes


@dataclass(frozen=True)
class FileLayout:
    """One safetensors file."""

    path: Path
    digest: str
    """BLAKE3 of the file's bytes before its first tensor: names, shapes, types, offsets."""
    tensors: tuple[TensorInfo, ...]
    """In the order in which they lie."""


def read_layout(directory: Path) -> list[FileLayout]:
    """The weights files of a Hugging Face directory, by name.

    Raises:
        UserError: no weights, malformed ones, tensors that overlap or leave gaps.
    """
    by_file: dict[Path, list[TensorInfo]] = {}
    for info in read_headers(directory).values():
        by_file.setdefault(info.file, []).append(info)
    return [_file_layout(path, by_file[path]) for path in sorted(by_file)]


def _file_layout(path: Path, tensors: list[TensorInfo]) -> FileLayout:
    tensors.sort(key=lambda info: (info.offset, info.nbytes, info.name))
    with path.open("rb") as file:
        length = file.read(8)
        header = length + file.read(int.from_bytes(length, "little"))
        size = file.seek(0, 2)
    ends = [len(header), *(info.offset + info.nbytes for info in tensors)]
    if [info.offset for info in tensors] + [size] != ends:
        raise UserError("its tensors do not lie one after the other", place=str(path))
    return FileLayout(path, digest_bytes(header), tuple(tensors))


def tensor_shapes(layout: list[FileLayout]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, {dtype, shape}) of every tensor, as a manifest says them."""
    for file in layout:
        for info in file.tensors:
            yield info.name, {"dtype": dtype_name(info.dtype), "shape": list(info.shape)}
