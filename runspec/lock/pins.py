"""Everything that a spec names, as it is on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from runspec.core.canonical import canonical_json
from runspec.core.files import expand_user
from runspec.core.hashing import digest_bytes
from runspec.core.spec.file_pins import (
    TOKENIZER_FILES,
    Progress,
    pin_chat_template,
    pin_data,
    pin_model,
    pin_named,
)
from runspec.core.spec.lock_file import DATA, MODEL, TOKENIZER, FilePin, Lock, Pin
from runspec.core.spec.plugins import SOURCE_GROUP
from runspec.core.spec.schema import RunSpec, Source
from runspec.lock.cache import COMMIT, Repository, is_repository, snapshot

HUB_DATA = "hf://datasets/"
GENERATORS = {"reasoning_gym": "reasoning-gym"}
"""The package that makes a kind's problems, where it is not the one that offers the kind."""


@dataclass(frozen=True)
class Looking:
    """How to look."""

    folder: Path
    """Of the spec's file, where relative names of models start from; data is looked for from where
    the process runs first."""
    env: Mapping[str, str]
    """Says where the Hugging Face cache lies."""
    known: Lock | None = None
    """A lock to compare with: weights are digested as they are there."""
    full: bool = False
    """Digests all bytes of weights, however large they are."""
    progress: Progress = lambda path, size: None


@dataclass
class Seen:
    """What is here, and what could not be pinned from here; by path of the spec."""

    pins: dict[str, Pin] = field(default_factory=dict)
    unknown: dict[str, tuple[Repository, str | None]] = field(default_factory=dict)
    """Repositories and revisions whose commit neither the spec nor the cache knows."""
    absent: dict[str, str] = field(default_factory=dict)
    """What is missing."""
    open: dict[str, str] = field(default_factory=dict)
    """What cannot be pinned at all."""


def look(spec: RunSpec, how: Looking) -> Seen:
    """Pins of the model, its tokenizer and the data, without a network.

    Raises:
        UserError: a file that is not what it should be.
    """
    looker = _Looker(how)
    if spec.model.hf is not None:
        looker.model(spec.model.hf, spec.model.revision)
    if (tokenizer := spec.model.tokenizer) is not None:
        looker.tokenizer(tokenizer.hf, tokenizer.revision)
    for source in spec.data.sources:
        looker.data(source)
    return looker.seen


class _Looker:
    """Goes from name to name and notes what it sees."""

    def __init__(self, how: Looking) -> None:
        self.seen = Seen()
        self._how = how

    def model(self, hf: str, revision: str | None) -> None:
        folder, commit = self._directory(MODEL, hf, revision, "config.json")
        files: dict[str, FilePin] = {}
        if folder is not None:
            known = self._how.known.model if self._how.known else None
            as_known = known.files if known else {}
            files = pin_model(folder, as_known, full=self._how.full, progress=self._how.progress)
        self._tokenizing(MODEL, hf, commit, folder, files)

    def tokenizer(self, hf: str, revision: str | None) -> None:
        folder, commit = self._directory(TOKENIZER, hf, revision, "tokenizer.json")
        progress = self._how.progress
        files = pin_named(folder, TOKENIZER_FILES, progress) if folder is not None else {}
        self._tokenizing(TOKENIZER, hf, commit, folder, files)

    def data(self, source: Source) -> None:
        path, uri = f"{DATA}{source.name}", source.uri
        said = source.model_dump(
            mode="json", exclude_defaults=True, exclude={"name", "uri", "revision"}
        )
        package = commit = None
        files: dict[str, FilePin] = {}
        if uri is None:
            package = _package(source.kind)
            if package is None:
                self.seen.absent[path] = f"no installed package makes kind {source.kind}"
        elif uri.startswith(HUB_DATA):
            commit = self._dataset(path, uri, source.revision)
        elif "://" in uri:
            self.seen.open[path] = f"{uri} is neither a local path nor {HUB_DATA}...: it may change"
        elif _is_there(local := self._rows(uri)):
            files = pin_data(local, self._how.progress)
        else:
            self.seen.absent[path] = f"no file {uri}"
        self.seen.pins[path] = Pin(
            source=uri or source.dataset or source.kind,
            commit=commit,
            files=files,
            package=package,
            parameters=digest_bytes(canonical_json(said)),
        )

    def _tokenizing(
        self,
        path: str,
        source: str,
        commit: str | None,
        folder: Path | None,
        files: dict[str, FilePin],
    ) -> None:
        template = pin_chat_template(folder) if folder is not None else None
        self.seen.pins[path] = Pin(
            source=source, commit=commit, files=files, chat_template=template
        )

    def _directory(
        self, path: str, name: str, revision: str | None, marker: str
    ) -> tuple[Path | None, str | None]:
        """The folder of a name and its commit; a local directory has none."""
        beside = self._how.folder / name  # as `runspec.cli.spec_files.located` takes it
        local = beside if _is_there(beside) else expand_user(Path(name))
        if _is_there(local / marker):
            return local, None
        if not is_repository(name):
            self.seen.absent[path] = f"no {marker} in {name}"
            return None, None
        return self._cached(path, Repository("model", name), revision)

    def _rows(self, uri: str) -> Path:
        """Local data: from where the process runs, as plug-ins take it, else beside the spec."""
        path = expand_user(Path(uri))
        return path if _is_there(path) else self._how.folder / path

    def _dataset(self, path: str, uri: str, revision: str | None) -> str | None:
        name, _, branch = "/".join(uri.removeprefix(HUB_DATA).split("/")[:2]).partition("@")
        if not is_repository(name):
            self.seen.absent[path] = f"no repository in {uri}"
            return None
        return self._cached(path, Repository("dataset", name), revision or branch or None)[1]

    def _cached(
        self, path: str, repository: Repository, revision: str | None
    ) -> tuple[Path | None, str | None]:
        found = snapshot(repository, revision, self._how.env)
        if found is not None:
            return found, found.name
        if revision is not None and COMMIT.fullmatch(revision):
            return None, revision
        self.seen.unknown[path] = (repository, revision)
        return None, None


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:  # names that are too long, folders that are not ours
        return False


def _package(kind: str) -> str | None:
    """Name and version of the package behind a kind of source; None where none is installed."""
    offered = [point.dist for point in entry_points(group=SOURCE_GROUP) if point.name == kind]
    name = GENERATORS.get(kind) or (offered[0].name if offered and offered[0] else None)
    if name is None:
        return None
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return None
