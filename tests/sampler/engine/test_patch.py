"""A version made from the last one by overwriting what changed: the same as loading it in full."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bridge.delta import changed_elements
from runspec.common.errors import UserError
from sampler.engine.engine import Engine
from tests.sampler.engine.conftest import cpu_pool
from tests.sampler.engine.models import Reference, save_version, write_probe
from tests.sampler.engine.requests import WAIT_S, batch

TWO_CORES = pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="a rank needs a core of its own"
)
PLAIN = "tests.sampler.engine.plain_matrices.PlainMatricesExtension"


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


def assert_holds(engine: Engine, version: Path) -> None:
    """What is sampled is the version's; `load` has compared bytes and probe."""
    reference, requests = Reference(version), batch(2, 2)
    for request, result in zip(requests, engine.submit(requests).result(WAIT_S), strict=True):
        expected, _ = reference.logprobs(list(request.prompt_tokens), result.output_tokens.tolist())
        assert np.abs(result.logprobs - expected).mean() < 1e-5


@pytest.fixture(
    scope="module",
    params=[
        ("packed", False, 1),
        ("packed", True, 1),
        ("plain", False, 1),
        ("plain", True, 1),
        pytest.param(("plain", True, 2), marks=TWO_CORES),
        pytest.param(("plain", False, 2), marks=TWO_CORES),
    ],
    ids=lambda p: f"{p[0]}, {'tied' if p[1] else 'untied'}, {p[2]} rank(s)",
)
def loaded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Engine, Path]]:
    """An engine, and the version that it holds. Packed: as vLLM has matrices on CPUs."""
    matrices, tied, ranks = request.param
    version = save_version(tmp_path_factory.mktemp("patch") / "v0", tied=tied)
    options = {"worker_extension_cls": PLAIN} if matrices == "plain" else {}
    with closing(Engine(cpu_pool(tensor=ranks), options=options)) as engine:
        engine.load(version, 0)
        yield engine, version


@pytest.mark.slow
def test_a_patched_engine_is_one_that_loaded_the_version(
    loaded: tuple[Engine, Path], tmp_path: Path
) -> None:
    engine, base = loaded
    engine.load(base, 0)
    newer = scattered(base, tmp_path / "v1")

    assert engine.load(newer, 1).patched

    assert_holds(engine, newer)
    # and again, and back
    further = scattered(newer, tmp_path / "v2", share=0.5, seed=2)
    assert engine.load(further, 2).patched
    assert_holds(engine, further)
    assert engine.load(base, 0).patched
    assert_holds(engine, base)


@pytest.mark.slow
def test_an_engine_that_was_not_patched_does_not_pass_the_check(
    loaded: tuple[Engine, Path], tmp_path: Path
) -> None:
    engine, base = loaded
    engine.load(base, 0)

    with pytest.raises(UserError, match="version 1"):
        engine.check(scattered(base, tmp_path / "v1"), 1)


@pytest.mark.slow
def test_a_version_of_another_layout_is_left_to_a_full_load(
    loaded: tuple[Engine, Path], tmp_path: Path
) -> None:
    engine, base = loaded
    engine.load(base, 0)
    other = scattered(base, tmp_path / "v1")
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.self_attn.extra.weight"] = torch.zeros(3)
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})

    assert not engine.patch(base, other)

    assert_holds(engine, base)


def test_changed_elements_are_where_bits_differ(tmp_path: Path) -> None:
    base = {"a": torch.zeros(5, 7), "b": torch.zeros(4, dtype=torch.bfloat16), "c": torch.ones(2)}
    newer = {name: tensor.clone() for name, tensor in base.items()}
    newer["a"][1, 2], newer["a"][4, 6] = -0.0, 3.0  # -0.0 is another bit pattern than 0.0
    newer["b"][3] = 1.0
    for name, tensors in (("v0", base), ("v1", newer)):
        (tmp_path / name).mkdir()
        save_file(tensors, tmp_path / name / "model.safetensors")

    found = {c.info.name: c for c in changed_elements(tmp_path / "v0", tmp_path / "v1")}

    assert found.keys() == {"a", "b"}
    assert found["a"].indices.tolist() == [9, 34]
    assert found["a"].bits.view(np.float32).tolist() == [-0.0, 3.0]
    assert found["b"].indices.tolist() == [3] and found["b"].bits.tolist() == [0x3F80]


def test_versions_of_other_tensors_have_no_difference(tmp_path: Path) -> None:
    for name, shape in (("v0", (2, 3)), ("v1", (3, 2))):
        (tmp_path / name).mkdir()
        save_file({"a": torch.zeros(shape)}, tmp_path / name / "model.safetensors")

    with pytest.raises(UserError, match="other tensors"):
        list(changed_elements(tmp_path / "v0", tmp_path / "v1"))
