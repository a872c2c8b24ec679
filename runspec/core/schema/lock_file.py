"""Lock of a spec, `<stem>.lock.yaml`: digests of the files that its names stand for.

`runspec lock` writes it beside the spec. It pins the model, the tokenizer and the data.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from runspec.core.canonical import digest_bytes, digest_file
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.schema.fields import Block
from runspec.core.schema.findings import Finding
from runspec.core.schema.validate import locate, to_python
from runspec.core.schema.yaml_nodes import MAX_CHARACTERS, Node, parse_yaml, text_at
from runspec.core.schema.yaml_text import to_yaml

LOCK_VERSION: Final = "runspec-lock/v2"
MODEL, TOKENIZER, DATA = "model", "model.tokenizer", "data.sources."
"""Paths of pins; the name of a source follows the last."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]
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
"""Weights up to this many bytes are digested whole, larger ones by their headers."""
MAX_FILES = 10_000
_MAX_HEADER = 100 * 10**6


class FilePin(Block):
    """Pin of one file, by exactly one of the digests."""

    size: Annotated[int, Field(ge=0)]
    """Bytes."""
    blake3: Digest | None = None
    """Digest of all its bytes."""
    header: Digest | None = None
    """BLAKE3 of a safetensors file's header: the names, types and shapes of its tensors."""


class Pin(Block):
    """Pin of one name of the spec."""

    source: str
    """The name as the spec writes it: a repository, a directory, a file, a generator."""
    commit: Commit | None = None
    """Commit of a repository on the Hub."""
    files: dict[str, FilePin] = {}
    """Files by name; of a repository, the files that were on the machine."""
    package: str | None = None
    """Name and version of the package that makes or reads the data."""


class Lock(Block):
    """All pins of a spec."""

    version: Literal["runspec-lock/v2"]
    pins: dict[str, Pin] = {}
    """Pins by path of the spec: `model`, `model.tokenizer` and `data.sources.<name>`.

    A model that the run makes itself has none. A model's own tokenizer is among its files."""


def lock_path(spec: Path, profile: str | None = None) -> Path:
    """Return `<stem>.lock.yaml` beside the spec, or `<stem>.<profile>.lock.yaml`.

    A profile has its own lock because it may name another model and other data.
    """
    middle = f".{profile}" if profile else ""
    return spec.with_name(f"{spec.stem}{middle}.lock.yaml")


def read_lock(spec: Path, profile: str | None = None) -> Lock | None:
    """Return the lock beside a spec; None if there is none.

    Raises:
        UserError: the file is not a valid lock.
    """
    path = lock_path(spec, profile)
    remedy = "make it again with `runspec lock`"
    try:
        if not path.is_file():
            return None
        text = read_bounded(path, MAX_CHARACTERS).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the lock: {error}", place=str(path), remedy=remedy) from error
    document = parse_yaml(text, str(path))
    findings = list(document.findings)
    lock = parse_lock(document.root, findings) if document.root and not findings else None
    for finding in findings:
        place = f"{path}:{finding.line}:{finding.column}"
        key = f"{finding.path}: " if finding.path else ""
        raise UserError(f"no lock: {key}{finding.message}", place=place, remedy=remedy)
    if lock is None:
        raise UserError("no lock: an empty file", place=str(path), remedy=remedy)
    return lock


def is_lock(root: Node) -> bool:
    """Return whether a file declares itself a lock."""
    return text_at(root, "version") == LOCK_VERSION


def parse_lock(root: Node, findings: list[Finding]) -> Lock | None:
    """Return the lock at a file's root, or None with a finding for each error."""
    try:
        return Lock.model_validate(to_python(root))
    except ValidationError as error:
        for item in error.errors(include_url=False):
            place = locate(root, item["loc"])[0]
            path = ".".join(str(step) for step in item["loc"])
            message = item["msg"].removeprefix("Value error, ")
            finding = Finding(place, "bad-value", message, path=path, blocking=True)
            findings.append(finding)
        return None


def write_lock(lock: Lock, spec: Path, profile: str | None = None) -> Path:
    """Write the lock beside the spec, without unset fields.

    Raises:
        UserError: it cannot be written.
    """
    path = lock_path(spec, profile)
    head = f"# What the names in {spec.name} stand for. Made by `runspec lock`; keep it in git.\n"
    text = head + to_yaml(lock.model_dump(mode="json", exclude_defaults=True))
    write_atomic(path, text.encode())
    return path


def pin_model(folder: Path) -> dict[str, FilePin]:
    """Pin the files of a model's directory that decide what it computes.

    Args:
        folder: holds config.json, tokenizer files and safetensors.
    """
    weights = sorted(folder.glob("*.safetensors"))
    whole = sum(path.stat().st_size for path in weights) <= WHOLE_BYTES
    pin_weights = pin_file if whole else pin_header
    return pin_named(folder, MODEL_FILES) | {path.name: pin_weights(path) for path in weights}


def pin_named(folder: Path, names: tuple[str, ...]) -> dict[str, FilePin]:
    """Pin the named files that exist in a folder."""
    there = ((name, folder / name) for name in names)
    return {name: pin_file(path) for name, path in there if path.is_file()}


def pin_data(path: Path) -> dict[str, FilePin]:
    """Pin a file, or all files below a folder by relative path, without hidden ones.

    Raises:
        UserError: more than MAX_FILES files.
    """
    if path.is_file():
        return {path.name: pin_file(path)}
    names = (file.relative_to(path) for file in path.rglob("*") if file.is_file())
    files = sorted(name for name in names if not any(part.startswith(".") for part in name.parts))
    if len(files) > MAX_FILES:
        raise UserError(f"more than {MAX_FILES} files", place=str(path))
    return {str(name): pin_file(path / name) for name in files}


def pin_file(path: Path) -> FilePin:
    """Pin a file by all its bytes."""
    size = path.stat().st_size
    return FilePin(size=size, blake3=digest_file(path) if size else digest_bytes(b""))


def pin_header(path: Path) -> FilePin:
    """Pin a safetensors file by its size and its header: tensor names, types, shapes, offsets.

    Raises:
        UserError: the file has no complete header.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= _MAX_HEADER else b""
    if not header or len(header) != length:
        raise UserError("no safetensors file: its header is cut short", place=str(path))
    return FilePin(size=path.stat().st_size, header=digest_bytes(header))
