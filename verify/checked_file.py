"""A file from outside that is believed by its digest: whole under its name, or not there."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from blake3 import blake3

from runspec.common.errors import UserError
from runspec.common.files import temporary_name


def write_checked(path: Path, pieces: Iterable[bytes], *, size: int, digest: str) -> None:
    """Writes a file from outside under a temporary name and renames it once it is what it must be.

    Raises:
        UserError: no room, or other bytes than the digest names.
    """
    temporary, hasher, written = temporary_name(path), blake3(), 0
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("xb") as file:
            for piece in pieces:
                written += len(piece)
                if written > size:
                    break
                hasher.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        if written != size or hasher.hexdigest() != digest:
            raise UserError(
                f"the coordinator sent other bytes than those of {digest[:16]}",
                place=str(path),
                remedy="the file changed after the coordinator started: start it again",
            )
        temporary.rename(path)
    except OSError as error:
        raise UserError(
            f"cannot write: {error.strerror or error}",
            place=str(path.parent),
            remedy="free disk space or mend the permissions, then start again",
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
