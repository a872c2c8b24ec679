"""LoRA adapters in PEFT's directory format (https://github.com/huggingface/peft).

    adapter_config.json          rank, alpha and the matrices that have an adapter
    adapter_model.safetensors    for each of them lora_A [r, in] and lora_B [out, r], float32

The tree is that of `learner_jax.lora`: leaves `a` [L, in..., r] and `b` [L, r, out...] for each
matrix W of the layers, to which they add (alpha / r) A B.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from bridge.output import output_directory
from bridge.safetensors_io import write_safetensors
from bridge.tensors import dtype_named
from bridge.weight_map import Entry, entry
from bridge.weight_map import Path as LeafPath
from runspec.core.models.config import ModelConfig
from runspec.core.models.parameters import adapter_rows, axis_sizes
from runspec.core.spec.schema import Lora

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"


def adapter_map(config: ModelConfig, *, rank: int, targets: Sequence[str]) -> list[Entry]:
    """The map of the adapters: two entries for each target, in the model's order.

    Args:
        config: of the base model.
        rank: r.
        targets: matrices of a layer that have an adapter, such as "q" and "down".
    """
    sizes = {**axis_sizes(config), "r": rank}
    return [entry(row, sizes) for row in adapter_rows(config, targets)]


def write_adapter(
    out_dir: Path,
    leaves: Mapping[LeafPath, np.ndarray],
    config: ModelConfig,
    *,
    lora: Lora,
    base_model: str,
) -> None:
    """Writes a PEFT directory, which appears by one rename.

    Args:
        out_dir: must not exist.
        leaves: every leaf of `adapter_map` by its path, float32.
        config: of the base.
        lora: rank, scale and matrices of the adapters.
        base_model: where PEFT will look for the base: a repository or a directory.

    Raises:
        UserError: `out_dir` exists, or cannot be written.
    """
    entries = adapter_map(config, rank=lora.rank, targets=lora.targets)
    shapes = {name: leaf.hf_shape for leaf in entries for name in leaf.tensor_names()}
    modules = {leaf.hf_name.rsplit(".", 3)[1] for leaf in entries}
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    with output_directory(out_dir) as folder:
        tensors = _tensors(entries, leaves)
        write_safetensors(folder / WEIGHTS_NAME, shapes, dtype_named("float32"), tensors)
        (folder / CONFIG_NAME).write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")


def _tensors(entries: list[Entry], leaves: Mapping[LeafPath, np.ndarray]) -> Iterator[np.ndarray]:
    for leaf in entries:
        for layer in leaves[leaf.path]:
            yield leaf.to_hf(layer)
