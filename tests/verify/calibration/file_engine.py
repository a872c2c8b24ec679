"""The small model in files, and a prefill engine that reads them where its location says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from bridge.safetensors_io import read_headers, read_tensor, write_safetensors
from bridge.tensors import dtype_named
from runspec.core.spec.schema import RunSpec
from tests.verify.small_model import HIDDEN, VOCAB, NumpyEngine, SmallModel
from verify.plugins import WeightsLocation

SHAPES = {"embed": (VOCAB, HIDDEN), "mix": (HIDDEN, HIDDEN), "head": (HIDDEN, VOCAB)}
CONFIG = {"hidden_size": HIDDEN, "num_hidden_layers": 1, "vocab_size": VOCAB}


def save_small_model(model: SmallModel, folder: Path) -> None:
    tensors = (getattr(model, name) for name in SHAPES)
    write_safetensors(folder / "model.safetensors", SHAPES, dtype_named("float32"), tensors)
    (folder / "config.json").write_text(json.dumps(CONFIG))


class FileEngine(NumpyEngine):
    """See `verify.plugins.PrefillEngine`: asks nobody, as all versions lie in its cache."""

    def __init__(self, spec: RunSpec, weights: WeightsLocation) -> None:
        super().__init__({}, weights.cache_dir)

    def ensure_version(self, version: int, manifest_digest: str, *, deadline_s: float) -> Path:
        folder = self.directory / f"v{version}"
        self.versions[version] = SmallModel(*_tensors(folder))
        return folder


def _tensors(folder: Path) -> Iterator:
    headers = read_headers(folder)
    return (read_tensor(headers[name]) for name in SHAPES)
