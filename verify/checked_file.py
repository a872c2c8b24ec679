"""A file from outside that is believed by its digest: whole under its name, or not there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from blake3 import blake3

from runspec.core.errors import UserError
from runspec.core.files import atomic_file


def write_checked(path: Path, pieces: Iterable[bytes], *, size: int, digest: str) -> None:
    """Writes a file from outside under a temporary name and renames it once it is what it must be.

    Raises:
        UserError: no room, or other bytes than the digest names.
    """
    hasher, written = blake3(), 0
    with atomic_file(path) as file:
        for piece in pieces:
            written += len(piece)
            if written > size:
                break
            hasher.update(piece)
            file.write(piece)
        if written != size or hasher.hexdigest() != digest:
            raise UserError(
                f"the coordinator sent other bytes than those of {digest[:16]}",
                place=str(path),
                remedy="the file changed after the coordinator started: start it again",
            )
