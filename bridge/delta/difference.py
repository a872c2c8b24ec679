"""What changed between two versions that both lie on a disk, without a delta file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bridge.delta.changes import changed_indices
from bridge.delta.layout import mapped_bits, tensor_segments
from bridge.safetensors_io import TensorInfo, read_headers
from runspec.core.errors import UserError


@dataclass(frozen=True)
class ChangedElements:
    """Elements of one tensor whose bits differ."""

    info: TensorInfo
    """The tensor, in the newer version."""
    indices: np.ndarray
    """intp [changed], ascending: in the flattened tensor."""
    bits: np.ndarray
    """u16 or u32 [changed]: the newer version's."""


def changed_elements(base_dir: Path, new_dir: Path) -> Iterator[ChangedElements]:
    """The elements whose bits differ, a segment of a tensor at a time, as the newer one lies.

    In memory are the pages of one segment (2**21 elements) of both and what changed in it.

    Args:
        base_dir: Hugging Face directory of the older version.
        new_dir: of the newer one.

    Raises:
        UserError: other tensors, types or shapes, or files that cannot be read.
    """
    base, new = read_headers(base_dir), read_headers(new_dir)
    shapes = [{n: (i.dtype, i.shape) for n, i in infos.items()} for infos in (base, new)]
    if shapes[0] != shapes[1]:
        raise UserError(f"holds other tensors than {base_dir}", place=str(new_dir))
    for name, info in sorted(new.items(), key=lambda item: (item[1].file, item[1].offset)):
        with base[name].file.open("rb") as old_file, info.file.open("rb") as new_file:
            at = 0
            cuts = zip(tensor_segments(base[name]), tensor_segments(info), strict=True)
            for old_cut, new_cut in cuts:
                bits = mapped_bits(new_file, info, new_cut)
                changed = changed_indices(mapped_bits(old_file, base[name], old_cut), bits)
                if len(changed):
                    yield ChangedElements(info, changed + at, bits[changed])
                at += len(bits)
