"""The adapters of a LoRA run as a PEFT directory, from a full state of the run."""

from __future__ import annotations

from pathlib import Path

from bridge.adapter import adapter_map, write_adapter
from bridge.orbax_io import open_leaves, read_leaf
from learner_jax.checkpoint import check_state, state_steps
from runspec.core.errors import UserError
from runspec.core.models.config import load_config
from runspec.core.run_files import ARRAYS_NAME, initial_model, state_folder
from runspec.core.spec.resolved import load_resolved


def export_adapter(run_dir: Path, out_dir: Path, *, step: int | None = None) -> int:
    """Writes the adapters in float32; policy version `step` is the base with them merged, rounded.

    Args:
        run_dir: of a run with `learner.lora`.
        out_dir: must not exist; `bridge.adapter` says what it gets.
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
    inside = {entry.path: ("params", *entry.path) for entry in entries}
    shapes = {inside[entry.path]: entry.leaf_shape for entry in entries}
    stores = open_leaves(folder, shapes, among_others=True)
    leaves = {
        entry.path: read_leaf(stores[inside[entry.path]], entry.path, place=folder)
        for entry in entries
    }
    base = spec.model.hf or str(model_dir.resolve())
    write_adapter(out_dir, leaves, config, lora=lora, base_model=base)
    return step
