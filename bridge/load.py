"""Hugging Face safetensors -> leaves of the JAX tree, or any slice of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bridge.safetensors_io import TensorInfo, listed, read_headers, read_slice
from bridge.tensors import contiguous, copy_into
from bridge.weight_map import Entry, hf_shapes, tied_tensors, weight_map
from bridge.weight_map import Path as LeafPath
from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig

_IGNORED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Constants that old checkpoints hold; they follow from the config."""
_COMPARED_BYTES = 1 << 24
_REMEDY = "use the config.json that belongs to these weights"


class LeafReader:
    """The leaves of a Hugging Face directory, read when asked for, only the bytes asked for."""

    def __init__(self, hf_dir: Path, config: ModelConfig) -> None:
        """Reads the headers, no weights.

        Args:
            hf_dir: a Hugging Face directory, one safetensors file or several with an index.
            config: its shape (`runspec.core.models.family.load_config`).

        Raises:
            UserError: unreadable files; tensors missing, not expected or of another shape, by name.
        """
        self._tensors = checked_headers(hf_dir, config)
        self.entries: dict[LeafPath, Entry] = {entry.path: entry for entry in weight_map(config)}

    def dtype(self, path: LeafPath) -> np.dtype:
        """The type that a leaf is read in: float32 or `ml_dtypes.bfloat16` as it is stored.

        float16 is read as float32, which has each of its values.

        Raises:
            UserError: its layers differ in type.
        """
        infos = self._infos(path)
        types = {_read_dtype(info.dtype) for info in infos}
        if len(types) != 1:
            raise UserError(
                f"layers of {self.entries[path].hf_name} differ in dtype",
                place=str(infos[0].file.parent),
            )
        return types.pop()

    def read(self, path: LeafPath, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Reads a leaf, or the part of it that `index` cuts.

        Memory: the part, and one layer of it twice.

        Args:
            path: such as ("layers", "attention", "q", "weight").
            index: a slice of step 1 for each dimension of the leaf, layers first where stacked.

        Returns:
            The part, C-contiguous, in the type of `dtype`.

        Raises:
            UserError: the files cannot be read, with the tensor's name.
        """
        entry, infos, dtype = self.entries[path], self._infos(path), self.dtype(path)
        bounds = index or (slice(None),) * len(entry.leaf_shape)
        if entry.layers is None:
            return contiguous(_read_part(entry, infos[0], bounds))
        chosen = infos[bounds[0]]
        shape = [len(range(n)[part]) for n, part in zip(entry.shape, bounds[1:], strict=True)]
        out = np.empty([len(chosen), *shape], dtype)
        for layer, info in enumerate(chosen):
            copy_into(out[layer], _read_part(entry, info, bounds[1:]))
        return out

    def parts(self, path: LeafPath) -> Iterator[np.ndarray]:
        """Reads a leaf layer by layer; the whole of it, once, where it is not stacked.

        Memory: a layer twice, of which the yielded one is C-contiguous. Errors as `read`.
        """
        entry = self.entries[path]
        for info in self._infos(path):
            yield contiguous(_read_part(entry, info, (slice(None),) * len(entry.shape)))

    def _infos(self, path: LeafPath) -> list[TensorInfo]:
        return [self._tensors[name] for name in self.entries[path].tensor_names()]


def _read_dtype(stored: np.dtype) -> np.dtype:
    return np.dtype(np.float32) if stored == np.float16 else stored


def _read_part(entry: Entry, info: TensorInfo, index: tuple[slice, ...]) -> np.ndarray:
    """The part of one layer of a leaf; a view of what was read.

    A slice of [in..., out...] is one of the tensor's [out..., in...]: its dimensions are split as
    the leaf's are, and moved.
    """
    shape = tuple(entry.shape[axis] for axis in entry.axes)
    split = TensorInfo(info.name, info.file, info.dtype, shape, info.offset)
    part = read_slice(split, tuple(index[axis] for axis in entry.axes))
    part = part.astype(_read_dtype(part.dtype), copy=False)
    return part.transpose(entry.inverse_axes())


def checked_headers(hf_dir: Path, config: ModelConfig) -> dict[str, TensorInfo]:
    """The headers of a model, exactly the tensors that its config asks for.

    A tied model may be stored with the embedding, the head, or both: libraries that store a shared
    tensor once keep either name.

    Raises:
        UserError: as `LeafReader`.
    """
    tensors = read_headers(hf_dir)
    expected, tied = dict(hf_shapes(config)), tied_tensors(config)
    for name, original in tied.items():
        if name in tensors and original not in tensors:
            tensors[original] = tensors.pop(name)
    if missing := expected.keys() - tensors.keys():
        raise UserError(f"tensors missing: {listed(missing)}", place=str(hf_dir), remedy=_REMEDY)
    unknown = {name for name in tensors.keys() - expected.keys() if not _IGNORED.fullmatch(name)}
    for name, original in tied.items():
        if name in unknown:
            _check_tied(tensors[name], tensors[original])
            unknown.remove(name)
    if unknown:
        raise UserError(f"tensors unexpected: {listed(unknown)}", place=str(hf_dir), remedy=_REMEDY)
    for name, shape in expected.items():
        if tensors[name].shape != shape:
            raise UserError(
                f"tensor {name} has shape {tensors[name].shape}, the config says {shape}",
                place=str(hf_dir),
                remedy=_REMEDY,
            )
    return {name: tensors[name] for name in expected}


def _check_tied(head: TensorInfo, embedding: TensorInfo) -> None:
    """Some tied models are stored with their head: it must be the embedding, bit by bit."""
    same = (head.shape, head.dtype) == (embedding.shape, embedding.dtype) and len(head.shape) == 2
    if same:
        rows = max(1, _COMPARED_BYTES // max(1, head.nbytes // max(1, head.shape[0])))
        for start in range(0, head.shape[0], rows):
            index = (slice(start, start + rows), slice(None))
            a, b = (read_slice(info, index).view(np.uint8) for info in (head, embedding))
            same = same and np.array_equal(a, b)
    if not same:
        raise UserError(
            f"the config ties {head.name} to the embedding, but they differ",
            place=str(head.file),
            remedy="set tie_word_embeddings to false in config.json",
        )
