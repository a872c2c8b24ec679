"""After a load: does the engine hold the bytes that the files hold?

vLLM fuses q, k and v into one parameter and gate and up into another, and gives each
tensor-parallel rank its slices. Here each tensor of the files is cut as its layer cuts it and
compared, byte for byte, with that part of the parameter. Parameters that the engine repacked (on
CPUs every matrix lives in a packed copy, and the original is dropped) or quantised cannot be read
back: they are named, and the log-probs of `probe.json` speak for them. A tensor that the engine
has no parameter for is a difference.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from bridge.safetensors_io import read_headers, read_tensor
from sampler.engine.requests import LoadReport

_PLAIN = (torch.float32, torch.bfloat16)
"""Types in which a parameter holds the bits of the files; any other is a quantised one."""


def compare_weights(model: Any, weights_dir: Path) -> LoadReport:
    """Compares a loaded vLLM model with the safetensors of a weights directory.

    Args:
        model: vLLM's module on this rank.
        weights_dir: a Hugging Face directory.
    """
    report = LoadReport([], [], [])
    fused = {
        part: (whole, position)
        for whole, parts in model.packed_modules_mapping.items()
        for position, part in enumerate(parts)
    }
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, info in read_headers(weights_dir).items():
        module_name, _, kind = name.rpartition(".")
        parent, _, leaf = module_name.rpartition(".")
        whole, position = fused.get(leaf, (leaf, None))
        path = f"{parent}.{whole}" if parent else whole
        parameter = parameters.get(f"{path}.{kind}")
        if parameter is None:  # vLLM skips some tensors of which its model has no use, in silence
            report.different.append(name)
            continue
        if parameter.numel() == 0 or parameter.dtype not in _PLAIN:
            report.repacked.append(name)
            continue
        theirs, ours = _cut(
            model.get_submodule(path), kind, position, parameter, _as_torch(read_tensor(info))
        )
        same = torch.equal(_bits(theirs), _bits(ours.to(parameter.dtype)))
        (report.compared if same else report.different).append(name)
        if parameter is model.lm_head.weight and hasattr(model.lm_head, "cpu_linear"):
            # On CPUs the head keeps its tensor beside the packed copy that it multiplies by.
            report.repacked.append(name)
    return report


def _cut(
    module: Any, kind: str, position: int | None, parameter: torch.Tensor, tensor: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The part of the parameter that came from the tensor, and the tensor's part on this rank."""
    from vllm.model_executor.layers.linear import (
        MergedColumnParallelLinear,
        QKVParallelLinear,
        RowParallelLinear,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, VocabParallelEmbedding):  # the head is one too
        rows = module.shard_indices
        cut = tensor[rows.org_vocab_start_index : rows.org_vocab_end_index]
        return parameter[: len(cut)], cut  # the padding of the vocabulary is not the files'
    if isinstance(module, QKVParallelLinear):
        assert position is not None
        heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
        sizes = [count * module.head_size for count in heads]
        # Where ranks outnumber the KV heads, several hold the same one.
        rank = module.tp_rank // (module.num_kv_head_replicas if position > 0 else 1)
        return _part(parameter, sizes, position), _slice(tensor, 0, sizes[position], rank)
    if isinstance(module, MergedColumnParallelLinear):
        assert position is not None
        sizes = [size // module.tp_size for size in module.output_sizes]
        return _part(parameter, sizes, position), _slice(tensor, 0, sizes[position], module.tp_rank)
    if isinstance(module, RowParallelLinear) and kind == "weight":
        return parameter, _slice(tensor, 1, parameter.shape[1], module.tp_rank)
    return parameter, tensor


def _part(parameter: torch.Tensor, sizes: list[int], position: int) -> torch.Tensor:
    return parameter.narrow(0, sum(sizes[:position]), sizes[position])


def _slice(tensor: torch.Tensor, axis: int, size: int, rank: int) -> torch.Tensor:
    return tensor.narrow(axis, rank * size, size)


def _as_torch(array: np.ndarray) -> torch.Tensor:
    if array.dtype == np.float32:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    # Compared as integers: two NaNs are the same bytes, 0.0 and -0.0 are not.
    integer = torch.int32 if tensor.element_size() == 4 else torch.int16
    return tensor.detach().cpu().contiguous().view(integer)
