"""Pins of the files that a spec names on this machine, and their comparison with its lock."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from runspec.core.entry_points import NAME as PACKAGE
from runspec.core.entry_points import entry_points_of
from runspec.core.errors import UserError
from runspec.core.files import expand_user
from runspec.core.spec.lock_file import (
    DATA,
    MODEL,
    TOKENIZER,
    TOKENIZER_FILES,
    FilePin,
    Pin,
    lock_path,
    pin_data,
    pin_file,
    pin_model,
    pin_named,
    read_lock,
)
from runspec.core.spec.plugins import SOURCE_GROUP
from runspec.core.spec.schema import RunSpec, Source
from runspec.core.spec.source_files import source_files, whole_uri
from runspec.lock.cache import COMMIT, Repository, is_repository, snapshot

HUB_DATA = "hf://datasets/"
GENERATORS = {"reasoning_gym": "reasoning-gym", "generated_reads": PACKAGE}
"""Package that makes a kind's problems or documents, if no other offers the kind as its own."""


@dataclass
class FoundPins:
    """Pins and failures by path of the spec."""

    pins: dict[str, Pin] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    """Message for each repository whose commit is in neither the spec nor the cache."""
    absent: dict[str, str] = field(default_factory=dict)
    """Message for each missing file or package."""
    open: dict[str, str] = field(default_factory=dict)
    """Message for each source that cannot be pinned."""


def find_pins(spec: RunSpec, folder: Path, env: Mapping[str, str]) -> FoundPins:
    """Pin the model, its tokenizer and the data, without a network.

    Args:
        spec: the resolved spec.
        folder: folder of the spec's file, base of relative model names. Relative data paths are
            looked up in the working directory first.
        env: HF_HUB_CACHE and HF_HOME name the Hugging Face cache.

    Raises:
        UserError: a file is malformed.
    """
    finder = _PinFinder(folder, env)
    if spec.model.hf is not None:
        finder.model(spec.model.hf, spec.model.revision)
    if (tokenizer := spec.model.tokenizer) is not None:
        finder.tokenizer(tokenizer.hf, tokenizer.revision)
    for source in spec.data.sources:
        finder.data(source)
    return finder.seen


class _PinFinder:
    """Collects the pins of a spec's names."""

    def __init__(self, folder: Path, env: Mapping[str, str]) -> None:
        self.seen = FoundPins()
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
            try:
                whole = source.model_copy(update={"uri": whole_uri(uri, self._folder)})
                files = {name: pin_file(file) for name, file in source_files(whole).items()}
            except UserError:
                self.seen.absent[path] = f"no file {uri}"
        self.seen.pins[path] = Pin(
            source=uri or source.dataset or source.kind, commit=commit, files=files, package=package
        )

    def _directory(
        self, path: str, name: str, revision: str | None, marker: str
    ) -> tuple[Path | None, str | None]:
        """Return the folder of a name and its commit; a local directory has no commit."""
        beside = self._folder / name  # as `runspec.cli.checks.located` takes it
        local = beside if _is_there(beside) else expand_user(Path(name))
        if _is_there(local / marker):
            return local, None
        if not is_repository(name):
            self.seen.absent[path] = f"no {marker} in {name}"
            return None, None
        return self._cached(path, Repository("model", name), revision)

    def _rows(self, uri: str) -> Path:
        """Return the path of local data: in the working directory, else beside the spec."""
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
    except OSError:  # too long a name, or no permission
        return False


def _package(kind: str) -> str | None:
    """Return name and version of the package of a kind of source; None if none is installed."""
    offered = [point.dist for point in entry_points_of(SOURCE_GROUP) if point.name == kind]
    name = GENERATORS.get(kind) or (offered[0].name if offered and offered[0] else None)
    if name is None:
        return None
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return None


def check_lock(
    spec: RunSpec,
    path: Path,
    profile: str | None = None,
    env: Mapping[str, str] | None = None,
) -> list[str]:
    """Return a sentence for each difference from the lock beside a spec; empty without a lock.

    Files that are not on this machine are compared by name and commit alone, without a network.

    Args:
        spec: the resolved spec.
        path: the spec's file.
        profile: the profile that it was resolved with.
        env: names the Hugging Face cache; the process's environment if None.

    Raises:
        UserError: the lock, or a file that it pins, cannot be read.
    """
    lock = read_lock(path, profile)
    if lock is None:
        return []
    seen = find_pins(spec, path.parent, os.environ if env is None else env)
    absent = [f"{where}: {what}" for where, what in seen.absent.items()]
    return [*absent, *differences(lock.pins, seen.pins)]


def require_lock(spec: RunSpec, path: Path, profile: str | None = None) -> None:
    """Require that a spec matches the lock beside it, if there is one.

    Raises:
        UserError: it lists every difference.
    """
    stale = check_lock(spec, path, profile)
    if stale:
        listed = "\n".join(f"  {sentence}" for sentence in stale)
        raise UserError(
            f"what is here is not what was locked:\n{listed}",
            place=str(lock_path(path, profile)),
            remedy="bring what the lock names, or accept what is here with `runspec lock`",
        )


def differences(locked: Mapping[str, Pin], here: Mapping[str, Pin]) -> list[str]:
    """Return a sentence for each difference between a lock's pins and those of this machine."""
    found = []
    for where in [*here, *(where for where in locked if where not in here)]:
        if where not in locked:
            found.append(f"{where}: {here[where].source} is not in the lock")
        elif where not in here:
            found.append(f"{where}: {locked[where].source} is in the lock, and not in the spec")
        else:
            found += [f"{where}: {what}" for what in _pin_differences(locked[where], here[where])]
    return found


def _pin_differences(locked: Pin, here: Pin) -> Iterator[str]:
    if locked.source != here.source:
        yield f"{here.source}, and {locked.source} in the lock"
        return
    if here.package and locked.package != here.package:
        yield f"{here.package}, and {locked.package or 'no package'} in the lock"
    if here.commit and locked.commit != here.commit:
        yield f"commit {here.commit}, and {locked.commit or 'none'} in the lock"
        return
    if here.files:  # else it is not on this machine
        yield from _file_differences(locked, here)


def _file_differences(locked: Pin, here: Pin) -> Iterator[str]:
    for name, pin in locked.files.items():
        if name not in here.files:
            yield f"{name} is in the lock, and not here"
        elif pin != here.files[name]:
            yield f"{name} is not the file of the lock: {_how(pin, here.files[name])}"
    # A repository may have been incomplete on the machine that wrote the lock.
    if locked.commit is None:
        yield from (
            f"{name} is not in the lock" for name in here.files.keys() - locked.files.keys()
        )


def _how(locked: FilePin, here: FilePin) -> str:
    if locked.size != here.size:
        return f"{here.size} bytes, {locked.size} in the lock"
    digest, kept = here.blake3 or here.header or "", locked.blake3 or locked.header or ""
    return f"digest {digest[:12]}, {kept[:12]} in the lock"
