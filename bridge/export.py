"""Orbax checkpoint -> Hugging Face directory, streaming."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from bridge.config import ModelConfig, load_config
from bridge.orbax_io import open_checkpoint, read_parts
from bridge.safetensors_io import INDEX_NAME, SINGLE_NAME, write_safetensors
from bridge.shards import MAX_SHARD_BYTES, plan_shards
from bridge.tensors import dtype_named, model_digest, tensor_record
from bridge.tokenizer_files import TOKENIZER_NAMES
from bridge.weight_map import Path as LeafPath
from bridge.weight_map import hf_shapes, weight_map
from runspec.common.canonical import canonical_json
from runspec.common.errors import UserError
from runspec.common.files import new_directory, write_atomic

TENSORS_NAME = "tensors.json"
PROBE_NAME = "probe.json"
GENERATION_NAME = "generation_config.json"
_LOG = logging.getLogger(__name__)


def export_checkpoint(
    orbax_dir: Path,
    out_dir: Path,
    *,
    model_dir: Path,
    dtype: str,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a checkpoint's parameters as a Hugging Face directory, which appears by one rename.

    Memory: the tensors that share one stored chunk of the checkpoint, and one cast copy. The
    bytes written are a function of the parameters, the config and `dtype` alone.

    Args:
        orbax_dir: what `orbax.checkpoint.v1.save` wrote of the parameter tree.
        out_dir: gets model*.safetensors (+ index where sharded), config.json with the new dtype,
            the tokenizer's files, `probe.json` where one lies beside `orbax_dir`, and
            `tensors.json` {"model_digest", "tensors": {name: {dtype, shape, blake3}}, "files":
            the names of the safetensors files}.
        model_dir: Hugging Face directory with the config and the tokenizer.
        dtype: `float32` or `bfloat16`; wider values are rounded to nearest even.
        max_shard_bytes: weights beyond it are split into several files with an index.

    Raises:
        UserError: unreadable or partial checkpoint, another model's, disk full, `out_dir` exists.
    """
    target = dtype_named(dtype)
    config = load_config(model_dir)
    stores = open_checkpoint(orbax_dir, config)
    try:
        with new_directory(out_dir) as folder:
            records = _write_weights(folder, orbax_dir, stores, config, target, max_shard_bytes)
            write_atomic(
                folder / TENSORS_NAME,
                canonical_json(
                    {
                        "model_digest": model_digest(records),
                        "tensors": records,
                        "files": sorted(path.name for path in folder.glob("*.safetensors")),
                    }
                ),
            )
            _write_config(folder, model_dir, dtype)
            copied = [model_dir / name for name in (*TOKENIZER_NAMES, GENERATION_NAME)]
            for source in [*copied, orbax_dir.parent / PROBE_NAME]:
                if source.exists():
                    shutil.copyfile(source, folder / source.name)
    except FileExistsError as error:
        raise UserError(
            "exists already", place=str(out_dir), remedy="name a new directory, or remove it"
        ) from error
    except OSError as error:
        raise UserError(
            f"cannot write: {error.strerror or error}",
            place=str(out_dir),
            remedy="free disk space or mend the permissions, then export again",
        ) from error


def _write_weights(
    folder: Path,
    orbax_dir: Path,
    stores: dict[LeafPath, ts.TensorStore],
    config: ModelConfig,
    dtype: np.dtype,
    max_shard_bytes: int,
) -> dict[str, dict[str, Any]]:
    """Writes the safetensors file or files; returns each tensor's record by name."""
    shards = plan_shards(dict(hf_shapes(config)), dtype.itemsize, max_shard_bytes)
    records: dict[str, dict[str, Any]] = {}
    stream = _tensors(orbax_dir, stores, config, dtype)
    index = {}
    for number, shapes in enumerate(shards, 1):
        name = SINGLE_NAME
        if len(shards) > 1:
            name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        # The names come first: zip must not take a tensor that belongs to the next shard.
        recorded = (_record(records, n, tensor) for n, tensor in zip(shapes, stream, strict=False))
        write_safetensors(folder / name, shapes, dtype, recorded)
        index.update(dict.fromkeys(shapes, name))
        _LOG.info("exported %s: %d tensors", name, len(shapes))
    if len(shards) > 1:
        total = sum(int(np.prod(r["shape"])) for r in records.values()) * dtype.itemsize
        listing = {"metadata": {"total_size": total}, "weight_map": index}
        (folder / INDEX_NAME).write_text(json.dumps(listing, indent=2, sort_keys=True) + "\n")
    return records


def _tensors(
    orbax_dir: Path, stores: dict[LeafPath, ts.TensorStore], config: ModelConfig, dtype: np.dtype
) -> Iterator[np.ndarray]:
    """Every Hugging Face tensor in the map's order, C-contiguous, in the target dtype."""
    for entry in weight_map(config):
        for part in read_parts(stores[entry.path], entry, place=orbax_dir):
            yield np.ascontiguousarray(entry.to_hf(part.astype(dtype, copy=False)))


def _record(records: dict[str, dict[str, Any]], name: str, tensor: np.ndarray) -> np.ndarray:
    records[name] = tensor_record(tensor)
    return tensor


def _write_config(folder: Path, model_dir: Path, dtype: str) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    config.pop("torch_dtype", None)  # the older name of the same field
    config["dtype"] = dtype
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
