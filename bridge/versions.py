"""Deltas as people use them: what changed between two versions, and the next from one."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from bridge.delta import DeltaSummary, apply_deltas, delta_tensors, write_delta
from bridge.model_files import copy_model_files
from bridge.output import output_directory
from bridge.records import write_records
from bridge.safetensors_io import INDEX_NAME


def changed_elements(old: Path, new: Path, out: Path | None) -> list[str]:
    """What changed between the weights of two directories: a line a tensor, and one of them all.

    Args:
        old, new: Hugging Face directories whose weights lie alike.
        out: gets the delta (`bridge.delta.write_delta`); None: nothing is kept.

    Raises:
        UserError: as `write_delta`.
    """
    if out is not None:
        return _lines(write_delta(old, new, out))
    with tempfile.TemporaryDirectory() as folder:
        return _lines(write_delta(old, new, Path(folder) / "delta"))


def _lines(summary: DeltaSummary) -> list[str]:
    lines = [
        f"{tensor.name}: {tensor.changed} of {tensor.elements} elements, {tensor.nbytes} bytes"
        for tensor in summary.tensors
        if tensor.changed
    ]
    share = 100 * summary.changed / summary.elements
    saved = summary.weights_bytes / summary.delta_bytes
    return [
        *lines,
        f"{summary.changed} of {summary.elements} elements changed ({share:.3g} %): "
        f"{summary.delta_bytes} bytes, {saved:.3g} times fewer than the weights",
    ]


def next_version(base: Path, delta: Path, out: Path) -> None:
    """Writes what a delta makes of a version, checked by its digests; it appears by one rename.

    The config and the tokenizer are the base's; its probe, which is of its own weights, stays.

    Args:
        base: Hugging Face directory that the delta was made against.
        delta: directory of `write_delta`.
        out: must not exist.

    Raises:
        UserError: as `bridge.delta.apply_deltas`; `out` exists, or cannot be written.
    """
    tensors = delta_tensors(base, delta)
    with output_directory(out) as folder:
        copy_model_files(base, folder)
        for path in [*base.glob("*.safetensors"), base / INDEX_NAME]:
            if path.exists():
                shutil.copyfile(path, folder / path.name)
        apply_deltas(folder, [delta], tensors)
        write_records(folder, tensors)
