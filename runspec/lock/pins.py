"""Everything that a spec names, as it is on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path

from runspec.core.files import expand_user
from runspec.core.spec.lock_file import (
    DATA,
    MODEL,
    TOKENIZER,
    TOKENIZER_FILES,
    FilePin,
    Pin,
    pin_data,
    pin_model,
    pin_named,
)
from runspec.core.spec.plugins import SOURCE_GROUP
from runspec.core.spec.schema import RunSpec, Source
from runspec.lock.cache import COMMIT, Repository, is_repository, snapshot

HUB_DATA = "hf://datasets/"
GENERATORS = {"reasoning_gym": "reasoning-gym"}
"""The package that makes a kind's problems, where it is not the one that offers the kind."""


@dataclass
class Seen:
    """What is here, and what could not be pinned from here; by path of the spec."""

    pins: dict[str, Pin] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    """Repositories whose commit neither the spec nor the cache knows."""
    absent: dict[str, str] = field(default_factory=dict)
    """What is missing."""
    open: dict[str, str] = field(default_factory=dict)
    """What cannot be pinned at all."""


def look(spec: RunSpec, folder: Path, env: Mapping[str, str]) -> Seen:
    """Pins of the model, its tokenizer and the data, without a network.

    Args:
        spec: as its layers make it.
        folder: of the spec's file, where relative names of models start from. Relative names of
            data start from the working directory first.
        env: HF_HUB_CACHE and HF_HOME say where the Hugging Face cache lies.

    Raises:
        UserError: a file that is not what it should be.
    """
    looker = _Looker(folder, env)
    if spec.model.hf is not None:
        looker.model(spec.model.hf, spec.model.revision)
    if (tokenizer := spec.model.tokenizer) is not None:
        looker.tokenizer(tokenizer.hf, tokenizer.revision)
    for source in spec.data.sources:
        looker.data(source)
    return looker.seen


class _Looker:
    """Goes from name to name and notes what it sees."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.seen = Seen()
        self._folder, self._env = folder, env

    def model(self, hf: str, revision: str | None) -> None:
        folder, commit = self._directory(MODEL, hf, revision, "config.json")
        files = pin_model(folder) if folder is not None else {}
        self.seen.pins[MODEL] = Pin(source=hf, commit=commit, files=files)

    def tokenizer(self, hf: str, revision: str | None) -> None:
        folder, commit = self._directory(TOKENIZER, hf, revision, "tokenizer.json")
        files = pin_named(folder, TOKENIZER_FILES) if folder is not None else {}
        self.seen.pins[TOKENIZER] = Pin(source=hf, commit=commit, files=files)

    def data(self, source: Source) -> None:
        path, uri = f"{DATA}{source.name}", source.uri
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
            files = pin_data(local)
        else:
            self.seen.absent[path] = f"no file {uri}"
        self.seen.pins[path] = Pin(
            source=uri or source.dataset or source.kind, commit=commit, files=files, package=package
        )

    def _directory(
        self, path: str, name: str, revision: str | None, marker: str
    ) -> tuple[Path | None, str | None]:
        """The folder of a name and its commit; a local directory has none."""
        beside = self._folder / name  # as `runspec.cli.spec_files.located` takes it
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
        return path if _is_there(path) else self._folder / path

    def _dataset(self, path: str, uri: str, revision: str | None) -> str | None:
        name, _, branch = "/".join(uri.removeprefix(HUB_DATA).split("/")[:2]).partition("@")
        if not is_repository(name):
            self.seen.absent[path] = f"no repository in {uri}"
            return None
        return self._cached(path, Repository("dataset", name), revision or branch or None)[1]

    def _cached(
        self, path: str, repository: Repository, revision: str | None
    ) -> tuple[Path | None, str | None]:
        found = snapshot(repository, revision, self._env)
        if found is not None:
            return found, found.name
        if revision is not None and COMMIT.fullmatch(revision):
            return None, revision
        self.seen.unknown[path] = (
            f"the commit of {repository.name} is not known: name it as `revision`, "
            "or download the repository"
        )
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
