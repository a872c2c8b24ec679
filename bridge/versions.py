"""Compares two versions, and makes the next version from a delta: for `python -m bridge`."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from bridge.delta import apply_deltas, delta_tensors, write_delta
from bridge.model_files import copy_model_files, output_directory
from bridge.safetensors_io import INDEX_NAME, read_headers, stored_record, write_records


def differences(first: Path, second: Path) -> list[str]:
    """Return what differs between the weights of two directories, a line a tensor.

    How the tensors are spread over files does not count. No tensor is read whole.
    """
    a, b = read_headers(first), read_headers(second)
    lines = []
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            lines.append(f"{name}: only in {first if name in a else second}")
            continue
        left, right = (stored_record(tensors[name]) for tensors in (a, b))
        lines += [
            f"{name}: {field} {value} and {right[field]}"
            for field, value in left.items()
            if value != right[field]
        ]
    return lines


def change_report(old: Path, new: Path, out: Path | None) -> list[str]:
    """Return what changed between two directories' weights: a line a tensor, and one of them all.

    Args:
        old, new: Hugging Face directories whose weights lie alike.
        out: gets the delta (`bridge.delta.write_delta`); None: nothing is kept.

    Raises:
        UserError: as `write_delta`.
    """
    with tempfile.TemporaryDirectory() as folder:
        summary = write_delta(old, new, out or Path(folder) / "delta")
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
    """Apply a delta to a version, and check the digests; the result appears by one rename.

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
