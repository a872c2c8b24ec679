"""A model's leaves, one after the other."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bridge.load import LeafReader
from bridge.weight_map import Path as LeafPath
from runspec.core.models.config import ModelConfig


def iter_leaves(hf_dir: Path, config: ModelConfig) -> Iterator[tuple[LeafPath, np.ndarray]]:
    reader = LeafReader(hf_dir, config)
    for path in reader.entries:
        yield path, reader.read(path)
