"""Exports the adapters of a LoRA run, from a full state, in PEFT's directory format.

    adapter_config.json          rank, alpha and the matrices that have an adapter
    adapter_model.safetensors    for each of them lora_A [r, in] and lora_B [out, r], float32

The format is that of https://github.com/huggingface/peft. The tree is that of `learner_jax.model`:
leaves `a` [L, in..., r] and `b` [L, r, out...] for each matrix W of the layers, to which they add
(alpha / r) A B.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from bridge.model_files import output_directory
from bridge.orbax_io import open_leaves, read_leaf
from bridge.weight_map import Entry, entry
from learner_jax.checkpoint import check_state, state_steps
from learner_jax.leaves import LeafPath, write_leaves
from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig
from runspec.core.models.family import load_config
from runspec.core.models.parameters import adapter_rows, axis_sizes
from runspec.core.run_files import ARRAYS_NAME, initial_model, state_folder
from runspec.core.schema import Lora
from runspec.core.schema.load import load_resolved

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"


def export_adapter(run_dir: Path, out_dir: Path, *, step: int | None = None) -> int:
    """Writes the adapters in float32; policy version `step` is the base with them merged, rounded.

    Args:
        run_dir: of a run with `learner.lora`.
        out_dir: the PEFT directory; must not exist.
        step: of which full state; by default the newest.

    Returns:
        The step.

    Raises:
        UserError: no LoRA run, no such state, a damaged one, or `out_dir` exists.
    """
    spec = load_resolved(run_dir)
    lora, states = spec.learner.lora, state_folder(run_dir, spec)
    if lora is None:
        raise UserError("this run trains no adapters", place="learner.lora")
    steps = state_steps(states)
    if not steps or step not in (None, *steps):
        there = ", ".join(map(str, steps)) or "none"
        raise UserError(f"no full state of step {step}; there are: {there}", place=str(states))
    step = steps[-1] if step is None else step
    check_state(states, step)
    model_dir, folder = initial_model(run_dir), states / f"step_{step}" / ARRAYS_NAME
    config = load_config(model_dir)
    entries = adapter_map(config, rank=lora.rank, targets=lora.targets)
    shapes = {("params", *entry.path): entry.leaf_shape for entry in entries}
    stores = open_leaves(folder, shapes, among_others=True)
    leaves = {path[1:]: read_leaf(store, path[1:], place=folder) for path, store in stores.items()}
    base = spec.model.hf or str(model_dir.resolve())
    write_adapter(out_dir, leaves, config, lora=lora, base_model=base)
    return step


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
    said = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted({leaf.hf_name.rsplit(".", 3)[1] for leaf in entries}),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }
    with output_directory(out_dir) as folder:
        write_leaves(folder / WEIGHTS_NAME, entries, leaves)
        (folder / CONFIG_NAME).write_text(json.dumps(said, indent=2, sort_keys=True) + "\n")
