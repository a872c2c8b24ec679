"""What holds of every engine that takes over a version by overwriting what changed.

Each begins with the version `base`, whatever the engine holds, and writes others to a folder.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from runspec.core.errors import UserError
from sampler.engine.engine import Engine
from tests.sampler.engine.agreement import assert_samples
from tests.sampler.engine.models import write_probe


def scattered(source: Path, directory: Path, *, share: float = 0.02, seed: int = 1) -> Path:
    """A copy of a version in which some elements of every tensor differ, here and there."""
    directory.mkdir()
    (directory / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = load_file(source / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        chosen = torch.rand(tensor.shape, generator=generator) < share
        chosen.view(-1)[-1] = True  # the last rank's last one too
        noise = 0.3 * torch.randn(tensor.shape, generator=generator)
        tensors[name] = torch.where(chosen, tensor + noise.to(tensor.dtype), tensor)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    write_probe(directory)
    return directory


def assert_patches(engine: Engine, base: Path, folder: Path) -> None:
    """A patched engine samples from the new version; `load` has compared bytes and probe."""
    engine.load(base, 0)
    newer = scattered(base, folder / "v1")

    assert engine.load(newer, 1).patched

    assert_samples(engine, newer)
    # and again, and back
    further = scattered(newer, folder / "v2", share=0.5, seed=2)
    assert engine.load(further, 2).patched
    assert_samples(engine, further)
    assert engine.load(base, 0).patched
    assert_samples(engine, base)


def assert_unpatched_is_caught(engine: Engine, base: Path, folder: Path) -> None:
    """An engine that holds the old version does not pass for the new one."""
    engine.load(base, 0)

    with pytest.raises(UserError, match="version 1"):
        engine.check(scattered(base, folder / "v1"), 1)


def assert_other_layout_is_left(engine: Engine, base: Path, folder: Path) -> None:
    """A version of other tensors is not patched, not even in part."""
    engine.load(base, 0)
    other = scattered(base, folder / "v1")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.self_attn.extra.weight"] = torch.zeros(3)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})

    assert not engine.patch(base, other)

    assert_samples(engine, base)
