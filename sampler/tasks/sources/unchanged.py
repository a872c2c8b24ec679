"""Files that must stay as they were when their rows were counted."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from runspec.core.errors import UserError


class Stamp:
    """Size and time of a file, held against it whenever it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        known = path.stat()
        self._known = (known.st_size, known.st_mtime_ns)

    def open(self) -> BinaryIO:
        """The file, to read.

        Raises:
            UserError: it is not there any more, or another one.
        """
        try:
            stream = self.path.open("rb")
            now = os.fstat(stream.fileno())
            if (now.st_size, now.st_mtime_ns) == self._known:
                return stream
            stream.close()
            reason = "changed while the run reads it"
        except OSError as error:
            reason = f"cannot be read any more: {error.strerror or error}"
        raise UserError(
            reason, place=str(self.path), remedy="put the file back as it was, then start again"
        )
