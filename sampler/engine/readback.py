"""After a load: does the engine hold the bytes that the files hold?

vLLM fuses q, k and v into one parameter and gate and up into another, and gives each
tensor-parallel rank its slices. Here each tensor of the files is cut as its layer cuts it and
compared, byte for byte, with that part of the parameter. Parameters that the engine repacked (on
CPUs every matrix lives in a packed copy, and the original is dropped) or quantised cannot be read
back: they are named, and the log-probs of `probe.json` speak for them. A tensor that the engine
has no parameter for is a difference.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bridge.safetensors_io import read_headers, read_tensor
from sampler.engine.requests import LoadReport

_PLAIN = (torch.float32, torch.bfloat16)
"""Types in which a parameter holds the bits of the files; any other is a quantised one."""


@dataclass(frozen=True)
class Place:
    """Where a tensor of the files is in the engine, on this rank."""

    module: str
    """Path of the layer."""
    view: torch.Tensor | None
    """The part of a parameter that holds this rank's slice; None where the engine repacked it."""
    axis: int
    start: int
    """This rank's slice of the tensor begins here along `axis`, and is as long as the view."""
    packed: bool
    """Whether the layer multiplies by a packed copy beside the view."""

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the tensor, in the view's type."""
        assert self.view is not None
        part = tensor.narrow(self.axis, self.start, self.view.shape[self.axis])
        return part.to(self.view.dtype)


def compare_weights(model: Any, weights_dir: Path) -> LoadReport:
    """Compares a loaded vLLM model with the safetensors of a weights directory.

    Args:
        model: vLLM's module on this rank.
        weights_dir: a Hugging Face directory.
    """
    report = LoadReport([], [], [])
    finder = PlaceFinder(model)
    for name, info in read_headers(weights_dir).items():
        place = finder.find(name)
        if place is None:  # vLLM skips some tensors of which its model has no use, in silence
            report.different.append(name)
            continue
        if place.view is None:
            report.repacked.append(name)
            continue
        ours = place.cut(as_torch(read_tensor(info)))
        same = torch.equal(_bits(place.view), _bits(ours))
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
        """The place of a tensor; None where the engine has no parameter for it."""
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
    """The part of the parameter that came from a tensor; where along which axis it was cut."""
    from vllm.model_executor.layers.linear import (
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, VocabParallelEmbedding):  # the head is one too
        rows = module.shard_indices
        count = rows.org_vocab_end_index - rows.org_vocab_start_index
        # The padding of the vocabulary is not the files'.
        return parameter.narrow(0, 0, count), 0, rows.org_vocab_start_index
    if isinstance(module, QKVParallelLinear):
        assert position is not None
        heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
        sizes = [count * module.head_size for count in heads]
        # Where ranks outnumber the KV heads, several hold the same one.
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
    """float32 as it is, anything of two bytes as bfloat16; without a copy."""
    if array.dtype == np.float32:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Compared as integers: two NaNs are the same bytes, 0.0 and -0.0 are not.
    integer = torch.int32 if tensor.element_size() == 4 else torch.int16
    return tensor.detach().cpu().contiguous().view(integer)
