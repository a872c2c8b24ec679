"""Names of Hugging Face repositories: their snapshots in the local cache, or local directories."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from runspec.core.errors import UserError
from runspec.core.files import expand_user

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
