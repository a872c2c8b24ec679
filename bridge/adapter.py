"""LoRA adapters in PEFT's directory format (https://github.com/huggingface/peft).

    adapter_config.json          rank, alpha and the matrices that have an adapter
    adapter_model.safetensors    for each of them lora_A [r, in] and lora_B [out, r], float32

The tree is that of `learner_jax.lora`: beside a matrix `q` of the layers the leaves `q_a`
[L, in..., r] and `q_b` [L, r, out...], which add (alpha / r) A B to it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bridge.config import ModelConfig
from bridge.safetensors_io import write_safetensors
from bridge.tensors import dtype_named
from bridge.weight_map import Entry, weight_map
from bridge.weight_map import Path as LeafPath
from runspec.common.errors import UserError
from runspec.common.files import new_directory

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"


def adapter_map(config: ModelConfig, *, rank: int, targets: Sequence[str]) -> list[Entry]:
    """The map of the adapters: two entries for each target, in the model's order.

    Args:
        config: of the base model.
        rank: r.
        targets: leaves of a layer that have an adapter, such as "q" and "down".
    """
    return [
        adapter
        for entry in weight_map(config)
        if entry.path[-1] in targets
        for adapter in _adapters(entry, rank)
    ]


def _adapters(entry: Entry, rank: int) -> tuple[Entry, Entry]:
    """A and B of one matrix: transposed, as the matrix is."""
    into, out = entry.shape[: entry.inputs], entry.shape[entry.inputs :]
    *above, leaf = entry.path
    module = entry.hf_name.removesuffix(".weight")

    def part(letter: str, shape: tuple[int, ...], hf_shape: tuple[int, int], inputs: int) -> Entry:
        return replace(
            entry,
            path=(*above, f"{leaf}_{letter.lower()}"),
            hf_name=f"base_model.model.{module}.lora_{letter}.weight",
            shape=shape,
            hf_shape=hf_shape,
            inputs=inputs,
        )

    return (
        part("A", (*into, rank), (rank, math.prod(into)), entry.inputs),
        part("B", (rank, *out), (math.prod(out), rank), 1),
    )


def write_adapter(
    out_dir: Path,
    leaves: Mapping[LeafPath, np.ndarray],
    config: ModelConfig,
    *,
    rank: int,
    alpha: float,
    targets: Sequence[str],
    base_model: str,
) -> None:
    """Writes a PEFT directory, which appears by one rename.

    Args:
        out_dir: must not exist.
        leaves: every leaf of `adapter_map` by its path, float32.
        config, rank, targets: as `adapter_map`.
        alpha: numerator of the scale alpha / rank.
        base_model: where PEFT will look for the base: a repository or a directory.

    Raises:
        UserError: `out_dir` exists, or cannot be written.
    """
    entries = adapter_map(config, rank=rank, targets=targets)
    shapes = {name: entry.hf_shape for entry in entries for name in entry.tensor_names()}
    modules = {entry.hf_name.rsplit(".", 3)[1] for entry in entries}
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": rank,
        "lora_alpha": alpha,
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
    for entry in entries:
        for layer in leaves[entry.path]:
            yield entry.to_hf(layer)
