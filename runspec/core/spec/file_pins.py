"""Digests of the files that a model, a tokenizer or a data set is made of."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.files import read_bounded
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
"""Weights up to this much in all are digested byte by byte, larger ones only when asked for."""
MAX_FILES = 10_000
_MAX_HEADER = 100 * 10**6
_MAX_TEMPLATE = 16 * 1024 * 1024

Progress = Callable[[Path, int], None]
"""Told of each file before it is digested, with its bytes."""


def pin_model(
    folder: Path, known: Mapping[str, FilePin], *, full: bool, progress: Progress
) -> dict[str, FilePin]:
    """The files of a model's directory that decide what it computes.

    Args:
        folder: with config.json, tokenizer files and safetensors.
        known: pins to compare with; each file is digested as it is there.
        full: digests all bytes of weights, however large they are.
        progress: told of each file.
    """
    pins = pin_named(folder, MODEL_FILES, progress)
    weights = sorted(folder.glob("*.safetensors"))
    full = full or sum(path.stat().st_size for path in weights) <= WHOLE_BYTES
    for path in weights:
        pin = known.get(path.name)
        whole = full if pin is None else pin.header is None
        pins[path.name] = pin_file(path, progress) if whole else pin_header(path)
    return pins


def pin_named(folder: Path, names: tuple[str, ...], progress: Progress) -> dict[str, FilePin]:
    """Those of the named files that are in a folder."""
    there = ((name, folder / name) for name in names)
    return {name: pin_file(path, progress) for name, path in there if path.is_file()}


def pin_data(path: Path, progress: Progress) -> dict[str, FilePin]:
    """A file, or all files below a folder by their paths in it; hidden ones are left out.

    Raises:
        UserError: more than MAX_FILES files.
    """
    if path.is_file():
        return {path.name: pin_file(path, progress)}
    files = sorted(_files_below(path))
    if len(files) > MAX_FILES:
        raise UserError(f"more than {MAX_FILES} files", place=str(path))
    return {str(file.relative_to(path)): pin_file(file, progress) for file in files}


def pin_file(path: Path, progress: Progress) -> FilePin:
    """A file by all its bytes."""
    size = path.stat().st_size
    progress(path, size)
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


def pin_chat_template(folder: Path) -> str | None:
    """Digest of the chat template that a tokenizer's directory has; None where it has none.

    chat_template.jinja comes before the one in tokenizer_config.json, as for every reader of them.
    """
    template = folder / "chat_template.jinja"
    if template.is_file():
        return digest_bytes(read_bounded(template, _MAX_TEMPLATE))
    config = folder / "tokenizer_config.json"
    if not config.is_file():
        return None
    try:
        said = json.loads(read_bounded(config, _MAX_TEMPLATE))
    except (ValueError, RecursionError) as error:
        raise UserError(f"no tokenizer config: {error}", place=str(config)) from error
    text = said.get("chat_template") if isinstance(said, dict) else None
    if text is None:
        return None
    # Several templates are a list of names and texts.
    return digest_bytes((text if isinstance(text, str) else json.dumps(text)).encode())


def _files_below(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path
