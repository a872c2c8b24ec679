"""Pins of the files that a spec names on this machine, and their comparison with its lock."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from runspec.core.entry_points import NAME as PACKAGE
from runspec.core.entry_points import entry_points_of
from runspec.core.errors import UserError
from runspec.core.files import expand_user
from runspec.core.schema import RunSpec, Source, lock_file
from runspec.core.schema.source_files import SOURCE_GROUP, source_files, whole_uri

HUB_DATA = "hf://datasets/"
GENERATORS = {"reasoning_gym": "reasoning-gym", "generated_reads": PACKAGE}
"""Package that makes a kind's problems or documents, if no other offers the kind as its own."""


@dataclass
class FoundPins:
    """Pins and failures by path of the spec."""

    folder: Path
    """Folder of the spec's file."""
    env: Mapping[str, str]
    """HF_HUB_CACHE and HF_HOME name the Hugging Face cache."""
    pins: dict[str, lock_file.Pin] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    """Message for each repository whose commit is in neither the spec nor the cache."""
    absent: dict[str, str] = field(default_factory=dict)
    """Message for each missing file or package."""
    open: dict[str, str] = field(default_factory=dict)
    """Message for each source that cannot be pinned."""

    def add_data(self, source: Source) -> None:
        """Pin the files, the commit or the package of a source."""
        path, uri = f"{lock_file.DATA}{source.name}", source.uri
        package = commit = None
        files: dict[str, lock_file.FilePin] = {}
        if uri is None:
            package = _package(source.kind)
            if package is None:
                self.absent[path] = f"no installed package makes kind {source.kind}"
        elif uri.startswith(HUB_DATA):
            name, _, branch = "/".join(uri.removeprefix(HUB_DATA).split("/")[:2]).partition("@")
            if is_repository(name):
                revision = source.revision or branch or None
                commit = self._cached(path, Repository("dataset", name), revision)[1]
            else:
                self.absent[path] = f"no repository in {uri}"
        elif "://" in uri:
            self.open[path] = f"{uri} is neither a local path nor {HUB_DATA}...: it may change"
        elif there := [
            at
            for at in (expand_user(Path(uri)), self.folder / expand_user(Path(uri)))
            if _is_there(at)
        ]:
            files = lock_file.pin_data(there[0])
        else:
            try:
                whole = source.model_copy(update={"uri": whole_uri(uri, self.folder)})
                files = {name: lock_file.pin_file(at) for name, at in source_files(whole).items()}
            except UserError:
                self.absent[path] = f"no file {uri}"
        self.pins[path] = lock_file.Pin(
            source=uri or source.dataset or source.kind, commit=commit, files=files, package=package
        )

    def directory(
        self, path: str, name: str, revision: str | None, marker: str
    ) -> tuple[Path | None, str | None]:
        """Return the folder of a name and its commit; a local directory has no commit."""
        beside = self.folder / name  # as `runspec.cli.checks.located` takes it
        local = beside if _is_there(beside) else expand_user(Path(name))
        if _is_there(local / marker):
            return local, None
        if not is_repository(name):
            self.absent[path] = f"no {marker} in {name}"
            return None, None
        return self._cached(path, Repository("model", name), revision)

    def _cached(
        self, path: str, repository: Repository, revision: str | None
    ) -> tuple[Path | None, str | None]:
        found = snapshot(repository, revision, self.env)
        if found is not None:
            return found, found.name
        if revision is not None and COMMIT.fullmatch(revision):
            return None, revision
        self.unknown[path] = (
            f"the commit of {repository.name} is not known: name it as `revision`, "
            "or download the repository"
        )
        return None, None


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
    found, model, tokenizer = FoundPins(folder, env), spec.model, spec.model.tokenizer
    if (hf := model.hf) is not None:
        at, commit = found.directory(lock_file.MODEL, hf, model.revision, "config.json")
        files = {} if at is None else lock_file.pin_model(at)
        found.pins[lock_file.MODEL] = lock_file.Pin(source=hf, commit=commit, files=files)
    if tokenizer is not None:
        path, marker = lock_file.TOKENIZER, "tokenizer.json"
        at, commit = found.directory(path, tokenizer.hf, tokenizer.revision, marker)
        files = {} if at is None else lock_file.pin_named(at, lock_file.TOKENIZER_FILES)
        found.pins[path] = lock_file.Pin(source=tokenizer.hf, commit=commit, files=files)
    for source in spec.data.sources:
        found.add_data(source)
    return found


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
    lock = lock_file.read_lock(path, profile)
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
            place=str(lock_file.lock_path(path, profile)),
            remedy="bring what the lock names, or accept what is here with `runspec lock`",
        )


def differences(
    locked: Mapping[str, lock_file.Pin], here: Mapping[str, lock_file.Pin]
) -> list[str]:
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


def _pin_differences(locked: lock_file.Pin, here: lock_file.Pin) -> Iterator[str]:
    if locked.source != here.source:
        yield f"{here.source}, and {locked.source} in the lock"
        return
    if here.package and locked.package != here.package:
        yield f"{here.package}, and {locked.package or 'no package'} in the lock"
    if here.commit and locked.commit != here.commit:
        yield f"commit {here.commit}, and {locked.commit or 'none'} in the lock"
        return
    if not here.files:  # it is not on this machine
        return
    for name, pin in locked.files.items():
        if name not in here.files:
            yield f"{name} is in the lock, and not here"
        elif pin != here.files[name]:
            yield f"{name} is not the file of the lock: {_how(pin, here.files[name])}"
    if locked.commit is None:  # a repository may have been incomplete where the lock was written
        for name in here.files.keys() - locked.files.keys():
            yield f"{name} is not in the lock"


def _how(locked: lock_file.FilePin, here: lock_file.FilePin) -> str:
    if locked.size != here.size:
        return f"{here.size} bytes, {locked.size} in the lock"
    digest, kept = here.blake3 or here.header or "", locked.blake3 or locked.header or ""
    return f"digest {digest[:12]}, {kept[:12]} in the lock"


COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_REF = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)

WEIGHTS = ("config.json", "*.safetensors")
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class Repository:
    """Repository on the Hub."""

    kind: Literal["model", "dataset"]
    name: str
    """Name, like Qwen/QwQ-32B."""


def is_repository(name: str) -> bool:
    """Return whether a name has the form of a repository, org/name."""
    return _NAME.fullmatch(name) is not None


def is_on_hub(name: str, folder: Path) -> bool:
    """Return whether a name means a repository: it has its form and is no directory in `folder`."""
    return is_repository(name) and not (folder / name).is_dir()


def model_cache(env: Mapping[str, str]) -> Path:
    """Return the folder of downloads from Hugging Face: HF_HUB_CACHE, or hub/ in HF_HOME."""
    home = Path(env.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    return Path(env.get("HF_HUB_CACHE") or home / "hub")


def snapshot(repository: Repository, revision: str | None, env: Mapping[str, str]) -> Path | None:
    """Return the folder of a repository's files at a commit; its name is the commit.

    None if the commit is not in the cache.

    Args:
        repository: the repository.
        revision: commit, branch or tag; `main` if None. A branch or tag stands for the commit of
            the last download.
        env: HF_HUB_CACHE and HF_HOME name the cache.
    """
    folder = model_cache(env) / f"{repository.kind}s--{repository.name.replace('/', '--')}"
    commit = revision or "main"
    if not COMMIT.fullmatch(commit):
        reference = folder / "refs" / commit
        if not _REF.fullmatch(commit) or not reference.is_file():
            return None
        commit = reference.read_text(encoding="utf-8", errors="replace")[:64].strip()
    found = folder / "snapshots" / commit
    return found if COMMIT.fullmatch(commit) and found.is_dir() else None


def require_files(name: str, folder: Path, patterns: Sequence[str] = ()) -> None:
    """Require that a name is a directory with certain files, or has the form of a repository.

    Args:
        name: a model or a tokenizer: a path, or org/name.
        folder: base of a relative path.
        patterns: glob patterns of files; each must match one.

    Raises:
        UserError: the directory does not exist, is a file, or lacks files.
    """
    path = folder / expand_user(Path(name))
    try:
        if path.is_dir():
            absent = [pattern for pattern in patterns if not any(path.glob(pattern))]
            if absent:
                raise UserError(
                    f"the directory {path} has no {', no '.join(absent)}",
                    remedy="name a Hugging Face directory: `save_pretrained` of the model and of "
                    "its tokenizer writes one",
                )
            return
        there = path.exists()
    except OSError:  # a repository name may be no valid path
        there = False
    if is_repository(name) and not there:
        return
    base = "" if Path(name).is_absolute() else f" (relative to {folder.absolute()})"
    raise UserError(
        f"{name[:200]} is no directory{base}" if there else f"no directory {name[:200]}{base}",
        remedy="mend the path, or name a repository of Hugging Face as org/name",
    )
