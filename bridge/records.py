"""`tensors.json`: what lies in a version's safetensors files, for its signed manifest."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bridge.safetensors_io import read_headers, stored_digest
from bridge.tensors import model_digest
from runspec.core.canonical import MalformedJson, canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic

TENSORS_NAME = "tensors.json"
MAX_BYTES = 64 * 1024 * 1024


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


def damage(folder: Path) -> str | None:
    """What is wrong with weights that an export left; None where every tensor has its digest.

    Nothing is read whole.
    """
    try:
        data = read_bounded(folder / TENSORS_NAME, MAX_BYTES)
        tensors = parse_object(data, max_bytes=MAX_BYTES)["tensors"]
        noted = {name: record["blake3"] for name, record in tensors.items()}
        found = read_headers(folder)
        if found.keys() != noted.keys():
            return f"{TENSORS_NAME} speaks of other tensors"
        wrong = (name for name, info in found.items() if stored_digest(info) != noted[name])
        return next((f"tensor {name} is not what was exported" for name in wrong), None)
    except UserError as error:
        return str(error)
    except (OSError, MalformedJson, KeyError, TypeError, AttributeError) as error:
        return f"{TENSORS_NAME} cannot be read: {error!r}"
