"""Whether `model.hf` and `model.tokenizer.hf` name a directory here, and what that lacks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.files import expand_user
from runspec.lock.cache import is_repository

WEIGHTS = ("config.json", "*.safetensors")
TOKENIZER = "tokenizer.json"


def require_files(name: str, folder: Path, patterns: Sequence[str] = ()) -> None:
    """Makes sure that a name is a directory with certain files, or has a repository's form.

    Args:
        name: of a model or a tokenizer: a path, or org/name.
        folder: where a relative path starts from.
        patterns: of the files; each must match one.

    Raises:
        UserError: no directory, a file in its place, or files that are missing.
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
    except OSError:  # a name that can be no path
        there = False
    if is_repository(name) and not there:
        return
    base = "" if Path(name).is_absolute() else f" (relative to {folder.absolute()})"
    raise UserError(
        f"{name[:200]} is no directory{base}" if there else f"no directory {name[:200]}{base}",
        remedy="mend the path, or name a repository of Hugging Face as org/name",
    )
