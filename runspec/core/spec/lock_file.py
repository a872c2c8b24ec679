"""`<stem>.lock.yaml` beside a spec: what the names in it stood for when `runspec lock` looked."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.spec.findings import Finding
from runspec.core.spec.schema import Block
from runspec.core.spec.validate import locate, to_python
from runspec.core.spec.yaml_nodes import MAX_CHARACTERS, MapNode, Node, parse_yaml
from runspec.core.spec.yaml_text import to_yaml

LOCK_VERSION: Final = "runspec-lock/v2"
MODEL, TOKENIZER, DATA = "model", "model.tokenizer", "data.sources."
"""Paths of pins; a source's name follows the last."""

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Commit = Annotated[str, Field(pattern=r"^[0-9a-f]{40}$")]


class FilePin(Block):
    """One file. Exactly one of the digests is there."""

    size: Annotated[int, Field(ge=0)]
    """Bytes."""
    blake3: Digest | None = None
    """Of all its bytes."""
    header: Digest | None = None
    """BLAKE3 of a safetensors file's header alone: the names, types and shapes of its tensors."""


class Pin(Block):
    """What one name stands for."""

    source: str
    """As the spec writes it: a repository, a directory, a file, a generator."""
    commit: Commit | None = None
    """Of a repository on the Hub."""
    files: dict[str, FilePin] = {}
    """By name; of a repository, those of them that were on the machine."""
    package: str | None = None
    """Name and version of the package that makes or reads the data."""


class Lock(Block):
    """All pins of a spec."""

    version: Literal["runspec-lock/v2"]
    pins: dict[str, Pin] = {}
    """By path of the spec: `model`, `model.tokenizer` and `data.sources.<name>`. A model that the
    run makes itself has none; its own tokenizer is among a model's files."""

    @property
    def model(self) -> Pin | None:
        return self.pins.get(MODEL)

    @property
    def tokenizer(self) -> Pin | None:
        return self.pins.get(TOKENIZER)

    @property
    def data(self) -> dict[str, Pin]:
        """By the source's name."""
        paths = (path for path in self.pins if path.startswith(DATA))
        return {path.removeprefix(DATA): self.pins[path] for path in paths}


def lock_path(spec: Path, profile: str | None = None) -> Path:
    """`<stem>.lock.yaml` beside the spec; `<stem>.<profile>.lock.yaml` with a profile, which may
    name another model and other data."""
    middle = f".{profile}" if profile else ""
    return spec.with_name(f"{spec.stem}{middle}.lock.yaml")


def read_lock(spec: Path, profile: str | None = None) -> Lock | None:
    """The lock beside a spec; None where there is none.

    Raises:
        UserError: a file that is no lock: it is refused whole.
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
    """Whether a file says that it is a lock."""
    version = root.entries.get("version") if isinstance(root, MapNode) else None
    return version is not None and to_python(version.value) == LOCK_VERSION


def parse_lock(root: Node, findings: list[Finding]) -> Lock | None:
    """The lock that a file's root makes, or None with a finding for everything in the way."""
    try:
        return Lock.model_validate(to_python(root))
    except ValidationError as error:
        for item in error.errors(include_url=False):
            place = locate(root, item["loc"])[0]
            path = ".".join(str(step) for step in item["loc"])
            finding = Finding(place, "bad-value", item["msg"], path=path, blocking=True)
            findings.append(finding)
        return None


def lock_text(lock: Lock, spec: Path) -> str:
    """The file's text: the pins that are there, and nothing of those that are not."""
    head = f"# What the names in {spec.name} stand for. Made by `runspec lock`; keep it in git.\n"
    return head + to_yaml(lock.model_dump(mode="json", exclude_defaults=True))


def write_lock(lock: Lock, spec: Path, profile: str | None = None) -> Path:
    """Writes the lock beside the spec.

    Raises:
        UserError: it cannot be written.
    """
    path = lock_path(spec, profile)
    write_atomic(path, lock_text(lock, spec).encode())
    return path
