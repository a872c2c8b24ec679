"""LoRA adapters in PEFT's directory format (https://github.com/huggingface/peft).

    adapter_config.json          rank, alpha and the matrices that have an adapter
    adapter_model.safetensors    for each of them lora_A [r, in] and lora_B [out, r], float32

The tree is that of `learner_jax.lora`: beside a matrix `q` of the layers the leaves `q_a`
[L, in..., r] and `q_b` [L, r, out...], which add (alpha / r) A B to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from bridge.safetensors_io import write_safetensors
from bridge.tensors import dtype_named
from bridge.weight_map import Entry, Row, axis_sizes, entry, rows, tensor_axes
from bridge.weight_map import Path as LeafPath
from runspec.core.errors import UserError
from runspec.core.files import new_directory
from runspec.core.models.config import ModelConfig
from runspec.core.spec.schema import Lora

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"


def adapter_map(config: ModelConfig, *, rank: int, targets: Sequence[str]) -> list[Entry]:
    """The map of the adapters: two entries for each target, in the model's order.

    Args:
        config: of the base model.
        rank: r.
        targets: leaves of a layer that have an adapter, such as "q" and "down".
    """
    sizes = {**axis_sizes(config), "r": rank}
    return [
        entry(adapter, sizes)
        for row in rows(config)
        if row.leaf.rpartition(".")[-1] in targets
        for adapter in _adapters(row)
    ]


def _adapters(matrix: Row) -> tuple[Row, Row]:
    """A and B of one matrix: transposed, as the matrix is."""
    out, into = tensor_axes(matrix)
    name = f"base_model.model.{matrix.hf_name.removesuffix('.weight')}"
    return (
        Row(f"{matrix.leaf}_a", f"{name}.lora_A.weight", f"L {into} r", f"r ({into})"),
        Row(f"{matrix.leaf}_b", f"{name}.lora_B.weight", f"L r {out}", f"({out}) r"),
    )


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
    try:
        with new_directory(out_dir) as folder:
            tensors = _tensors(entries, leaves)
            write_safetensors(folder / WEIGHTS_NAME, shapes, dtype_named("float32"), tensors)
            (folder / CONFIG_NAME).write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")
    except FileExistsError as error:
        raise UserError("exists already", place=str(out_dir), remedy="name another") from error
    except OSError as error:
        raise UserError(f"cannot write: {error.strerror or error}", place=str(out_dir)) from error


def _tensors(entries: list[Entry], leaves: Mapping[LeafPath, np.ndarray]) -> Iterator[np.ndarray]:
    for leaf in entries:
        for layer in leaves[leaf.path]:
            yield leaf.to_hf(layer)
