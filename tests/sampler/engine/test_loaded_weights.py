"""A version made from the last one by overwriting what changed: the same as loading it in full."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bridge.delta import changed_elements
from runspec.core.errors import UserError
from sampler.engine.engine import Engine
from tests.sampler.engine.agreement import assert_takes_over
from tests.sampler.engine.conftest import running_engine

PLAIN = "tests.sampler.engine.plain_matrices.PlainMatricesExtension"


@pytest.fixture(
    scope="module",
    params=[("packed", "untied"), ("packed", "tied"), ("plain", "untied"), ("plain", "tied")],
    ids=" ".join,
)
def loaded(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Path]]:
    """An engine on one rank, and a version for it. Packed: as vLLM has matrices on CPUs."""
    matrices, head = request.param
    version = request.getfixturevalue(head)
    if matrices == "packed":
        yield request.getfixturevalue(f"_{head}_engine"), version
    else:
        with running_engine(version, worker_extension_cls=PLAIN) as engine:
            yield engine, version


@pytest.mark.slow
def test_a_patched_engine_is_one_that_loaded_the_version(
    loaded: tuple[Engine, Path], tmp_path: Path
) -> None:
    assert_takes_over(*loaded, tmp_path)


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
