"""What holds of every engine that takes over a version by overwriting what changed."""

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


def assert_takes_over(engine: Engine, base: Path, folder: Path) -> None:
    """A patched engine samples from the new version; one that was not patched does not pass for it,
    and a version of other tensors is not patched, not even in part."""
    engine.load(base, 0)
    newer = scattered(base, folder / "v1")
    with pytest.raises(UserError, match="version 1"):
        engine.check(newer, 1)

    # `load` compares bytes and probe; once, again and back
    further = scattered(newer, folder / "v2", share=0.5, seed=2)
    for number, version in ((1, newer), (2, further), (0, base)):
        assert engine.load(version, number).patched
        assert_samples(engine, version)

    tensors = load_file(newer / "model.safetensors")
    tensors["model.layers.0.self_attn.extra.weight"] = torch.zeros(3)
    save_file(tensors, newer / "model.safetensors", metadata={"format": "pt"})
    assert not engine.patch(base, newer)
    assert_samples(engine, base)
