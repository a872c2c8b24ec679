"""The Hugging Face cache: which commit of a repository is on this machine, and where."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

COMMIT = re.compile(r"[0-9a-f]{40}")
_NAME = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}/[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)
_REF = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}", re.ASCII)


@dataclass(frozen=True)
class Repository:
    """A repository on the Hub."""

    kind: Literal["model", "dataset"]
    name: str
    """Like Qwen/QwQ-32B."""


def is_repository(name: str) -> bool:
    """Whether a name has the form of a repository's, org/name."""
    return _NAME.fullmatch(name) is not None


def is_on_hub(name: str, folder: Path) -> bool:
    """Whether a name is a repository's: of its form, and no directory in the spec's folder."""
    return is_repository(name) and not (folder / name).is_dir()


def model_cache(env: Mapping[str, str]) -> Path:
    """Where downloads from Hugging Face lie: HF_HUB_CACHE, or hub/ in HF_HOME."""
    home = Path(env.get("HF_HOME") or "~/.cache/huggingface").expanduser()
    return Path(env.get("HF_HUB_CACHE") or home / "hub")


def snapshot(repository: Repository, revision: str | None, env: Mapping[str, str]) -> Path | None:
    """The folder of a repository's files at a commit; its name is the commit.

    Args:
        repository: which one.
        revision: commit, branch or tag; `main` when None. Branches and tags are where they were
            when they were last downloaded.
        env: HF_HUB_CACHE and HF_HOME say where the cache lies.
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
