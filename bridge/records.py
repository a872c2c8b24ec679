"""`tensors.json`: what lies in a version's safetensors files, for its signed manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.tensors import model_digest
from runspec.common.canonical import canonical_json
from runspec.common.files import write_atomic

TENSORS_NAME = "tensors.json"


def write_records(folder: Path, tensors: Mapping[str, Mapping[str, Any]]) -> None:
    """Writes {"model_digest", "tensors", "files": the names of the safetensors files there}.

    Args:
        folder: of the version, its weights written.
        tensors: record {dtype, shape, blake3} of each tensor by name.
    """
    record = {
        "model_digest": model_digest(tensors),
        "tensors": tensors,
        "files": sorted(path.name for path in folder.glob("*.safetensors")),
    }
    write_atomic(folder / TENSORS_NAME, canonical_json(record))
