"""Which names are of repositories on the Hugging Face Hub."""

from __future__ import annotations

import re
from pathlib import Path

_REPOSITORY = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")


def is_on_hub(name: str, folder: Path) -> bool:
    """Whether a name is a repository's: of its form, and no directory in the spec's folder."""
    if not _REPOSITORY.fullmatch(name) or name.startswith("."):
        return False
    return not (folder / name).is_dir()
