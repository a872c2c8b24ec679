from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.bridge.delta.weights import BF16, F32, normal, nudged, write_weights

Copy = Callable[[Path], Path]


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    """Copies a directory of weights beside it, for a delta to be applied to."""

    def make(directory: Path) -> Path:
        target = tmp_path / f"copy-of-{directory.name}"
        shutil.rmtree(target, ignore_errors=True)
        return Path(shutil.copytree(directory, target))

    return make


@pytest.fixture
def versions(tmp_path: Path, rng: np.random.Generator) -> list[Path]:
    """Four versions of a model of odd shapes and both types, in two files."""
    tensors = {
        "embed": normal(rng, (31, 17), BF16),
        "norm": normal(rng, (7,), BF16),
        "scale": normal(rng, (13, 3), F32),  # at an offset that is no multiple of four
        "empty": normal(rng, (0, 4), BF16),
        "head": normal(rng, (17, 31), F32),
    }
    made = []
    for number in range(4):
        made.append(write_weights(tmp_path / f"v{number}", tensors, files=2))
        tensors = nudged(rng, tensors, 0.05)
    return made
