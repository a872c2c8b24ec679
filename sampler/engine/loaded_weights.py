"""Weights inside the engine: compared with the files after a load, and patched to another version.

vLLM fuses q, k and v into one parameter and gate and up into another, and gives each
tensor-parallel rank its slices. Each tensor of the files is cut as its layer cuts it and compared,
byte for byte, with that part of the parameter. Parameters that the engine repacked (on CPUs every
matrix lives in a packed copy, and the original is dropped) or quantised cannot be read back. They
are named, and the log-probs of `probe.json` check them. A tensor without a parameter in the engine
is a difference.

A switch reads the new version once. If a parameter holds the bits of the files, this rank's slice
of a tensor is brought to the device, compared, written in place where it differs, and compared
again. If a layer is repacked or quantised, the files of both versions are compared, and vLLM's own
loader reloads it if they differ. Both ways write into the existing tensors, so CUDA graphs, which
hold addresses, compute with the new version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bridge.safetensors_io import TensorInfo, read_headers, read_slice, read_tensor
from sampler.engine.requests import LoadReport

_PLAIN = (torch.float32, torch.bfloat16)
"""Types of parameters that hold the bits of the files; any other type is quantised."""
Reload = Callable[[Iterable[tuple[str, torch.Tensor]]], None]
"""vLLM's loader: (name, tensor) of whole layers."""


@dataclass(frozen=True)
class Place:
    """Where a tensor of the files is in the engine, on this rank."""

    module: str
    """Path of the layer."""
    view: torch.Tensor | None
    """The part of a parameter that holds this rank's slice; None if the engine repacked it."""
    axis: int
    start: int
    """This rank's slice of the tensor begins here along `axis`, and is as long as the view."""
    packed: bool
    """Whether the layer multiplies by a packed copy beside the view."""

    def read(self, info: TensorInfo) -> torch.Tensor:
        """Return this rank's slice of a tensor of a file, in the view's type, on its device."""
        assert self.view is not None
        index = [slice(None)] * len(info.shape)
        index[self.axis] = slice(self.start, self.start + self.view.shape[self.axis])
        return as_torch(read_slice(info, tuple(index))).to(self.view.device, self.view.dtype)


def compare_weights(model: Any, weights_dir: Path) -> LoadReport:
    """Compare a loaded vLLM model with the safetensors of a weights directory.

    Args:
        model: vLLM's module on this rank.
        weights_dir: a Hugging Face directory.
    """
    report = LoadReport([], [], [])
    finder = PlaceFinder(model)
    for name, info in read_headers(weights_dir).items():
        place = finder.find(name)
        if place is None:  # vLLM silently skips tensors that its model does not use
            report.different.append(name)
            continue
        if place.view is None:
            report.repacked.append(name)
            continue
        same = _same(place.view, place.read(info))
        (report.compared if same else report.different).append(name)
        if place.packed:
            report.repacked.append(name)
    return report


class PlaceFinder:
    """Finds the files' tensors in vLLM's module of this rank."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters = dict(model.named_parameters(remove_duplicate=False))
        self._fused = {
            part: (whole, position)
            for whole, parts in model.packed_modules_mapping.items()
            for position, part in enumerate(parts)
        }

    def find(self, name: str) -> Place | None:
        """Return where a tensor is; None if the engine has no parameter for it."""
        module_name, _, kind = name.rpartition(".")
        parent, _, leaf = module_name.rpartition(".")
        whole, position = self._fused.get(leaf, (leaf, None))
        path = f"{parent}.{whole}" if parent else whole
        parameter = self._parameters.get(f"{path}.{kind}")
        if parameter is None:
            return None
        if parameter.numel() == 0 or parameter.dtype not in _PLAIN:
            return Place(path, None, 0, 0, packed=True)
        view, axis, start = _cut(self._model.get_submodule(path), kind, position, parameter)
        # On CPUs the head keeps its tensor beside the packed copy that it multiplies by.
        head = self._model.lm_head
        packed = parameter is head.weight and hasattr(head, "cpu_linear")
        return Place(path, view, axis, start, packed)


def _cut(
    module: Any, kind: str, position: int | None, parameter: torch.Tensor
) -> tuple[torch.Tensor, int, int]:
    """Return the part of the parameter that came from a tensor; axis and start of the cut."""
    from vllm.model_executor.layers.linear import (
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, VocabParallelEmbedding):  # the head is one too
        rows = module.shard_indices
        count = rows.org_vocab_end_index - rows.org_vocab_start_index
        # The files do not hold the padding of the vocabulary.
        return parameter.narrow(0, 0, count), 0, rows.org_vocab_start_index
    if isinstance(module, QKVParallelLinear):
        assert position is not None
        heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
        sizes = [count * module.head_size for count in heads]
        # If there are more ranks than KV heads, several ranks hold the same head.
        rank = module.tp_rank // (module.num_kv_head_replicas if position > 0 else 1)
        return _part(parameter, sizes, position), 0, rank * sizes[position]
    if isinstance(module, MergedColumnParallelLinear):
        assert position is not None
        sizes = [size // module.tp_size for size in module.output_sizes]
        return _part(parameter, sizes, position), 0, module.tp_rank * sizes[position]
    if isinstance(module, RowParallelLinear) and kind == "weight":
        return parameter, 1, module.tp_rank * parameter.shape[1]
    return parameter, 0, 0


def _part(parameter: torch.Tensor, sizes: list[int], position: int) -> torch.Tensor:
    return parameter.narrow(0, sum(sizes[:position]), sizes[position])


def as_torch(array: np.ndarray) -> torch.Tensor:
    """Return a tensor that shares an array's memory: float32 and float16 as they are, other
    two-byte types as bfloat16."""
    if array.dtype in (np.float32, np.float16):
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _same(view: torch.Tensor, ours: torch.Tensor) -> bool:
    """Return whether a part of a parameter has the bytes of a tensor, compared on its device."""
    # Integers compare bytes: equal NaNs are equal, and 0.0 differs from -0.0.
    integer = torch.int32 if view.element_size() == 4 else torch.int16
    both = (each.detach().contiguous().view(integer) for each in (view, ours))
    return torch.equal(*both)


def _bytes(array: np.ndarray) -> np.ndarray:
    return array.reshape(-1).view(np.uint8)


def patch_weights(
    model: Any, base_dir: Path, weights_dir: Path, *, reload: Reload
) -> LoadReport | None:
    """Change a model from one version to another in place, and compare it with the files.

    The new version is read once. Of the loaded one only tensors are read that the engine repacked.

    Args:
        model: vLLM's module on this rank.
        base_dir: directory of the loaded version.
        weights_dir: directory of the new version.
        reload: loads layers that cannot be overwritten.

    Returns:
        As `compare_weights`. None: nothing was changed, because the versions have different tensors
        or the engine has no parameter for one.

    Raises:
        UserError: a file cannot be read.
    """
    old, new = read_headers(base_dir), read_headers(weights_dir)
    if {n: (i.dtype, i.shape) for n, i in old.items()} != {
        n: (i.dtype, i.shape) for n, i in new.items()
    }:
        return None
    finder = PlaceFinder(model)
    places = {name: place for name in new if (place := finder.find(name)) is not None}
    if len(places) < len(new):
        return None
    tied = bool(model.config.tie_word_embeddings)
    report, layers, head_changed = LoadReport([], [], []), set(), False
    for name, info in new.items():
        place = places[name]
        if place.view is None:
            report.repacked.append(name)
            if not np.array_equal(_bytes(read_tensor(old[name])), _bytes(read_tensor(info))):
                layers.add(place.module)
            continue
        ours = place.read(info)
        if not _same(place.view, ours):
            head_changed |= place.packed
            # A tied head has the embedding's parameter; its packed copy is rebuilt below.
            if place.packed and not tied:
                layers.add(place.module)
            else:
                with torch.no_grad():
                    place.view.copy_(ours)
        if not place.packed:
            (report.compared if _same(place.view, ours) else report.different).append(name)
    if layers:
        names = [name for name, place in places.items() if place.module in layers]
        reload((name, as_torch(read_tensor(new[name]))) for name in names)
    if head_changed:
        model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    for name, place in places.items():
        if place.view is not None and place.packed:  # one tensor, on CPUs
            same = _same(place.view, place.read(new[name]))
            (report.compared if same else report.different).append(name)
            report.repacked.append(name)
    return report
