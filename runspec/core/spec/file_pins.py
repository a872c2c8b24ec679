"""Digests of the files that a model, a tokenizer or a data set is made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes, digest_file
from runspec.core.spec.lock_file import FilePin

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    *TOKENIZER_FILES,
    "model.safetensors.index.json",
)
WHOLE_BYTES = 2 * 10**9
"""Weights up to this many bytes in all are digested whole, larger ones by their headers."""
MAX_FILES = 10_000
_MAX_HEADER = 100 * 10**6


def pin_model(folder: Path) -> dict[str, FilePin]:
    """Pin the files of a model's directory that decide what it computes.

    Args:
        folder: with config.json, tokenizer files and safetensors.
    """
    weights = sorted(folder.glob("*.safetensors"))
    whole = sum(path.stat().st_size for path in weights) <= WHOLE_BYTES
    pin_weights = pin_file if whole else pin_header
    return pin_named(folder, MODEL_FILES) | {path.name: pin_weights(path) for path in weights}


def pin_named(folder: Path, names: tuple[str, ...]) -> dict[str, FilePin]:
    """Those of the named files that are in a folder."""
    there = ((name, folder / name) for name in names)
    return {name: pin_file(path) for name, path in there if path.is_file()}


def pin_data(path: Path) -> dict[str, FilePin]:
    """A file, or all files below a folder by their paths in it; hidden ones are left out.

    Raises:
        UserError: more than MAX_FILES files.
    """
    if path.is_file():
        return {path.name: pin_file(path)}
    files = sorted(_files_below(path))
    if len(files) > MAX_FILES:
        raise UserError(f"more than {MAX_FILES} files", place=str(path))
    return {str(file.relative_to(path)): pin_file(file) for file in files}


def pin_file(path: Path) -> FilePin:
    """A file by all its bytes."""
    size = path.stat().st_size
    return FilePin(size=size, blake3=digest_file(path) if size else digest_bytes(b""))


def pin_header(path: Path) -> FilePin:
    """A safetensors file by its size and its header: names, types, shapes and offsets of tensors.

    Raises:
        UserError: it has no header.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= _MAX_HEADER else b""
    if not header or len(header) != length:
        raise UserError("no safetensors file: its header is cut short", place=str(path))
    return FilePin(size=path.stat().st_size, header=digest_bytes(header))


def _files_below(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path
