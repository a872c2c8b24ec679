"""Files to carry: random, so that nothing can be shared, guessed or squeezed."""

from __future__ import annotations

import os
from pathlib import Path

_PIECE_BYTES = 16 * 2**20


def write_weights(directory: Path, size: int) -> Path:
    """Makes a version's directory whose weights are `size` random bytes."""
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    with (directory / "model.safetensors").open("wb") as file:
        for offset in range(0, size, _PIECE_BYTES):
            file.write(os.urandom(min(_PIECE_BYTES, size - offset)))
    return directory
