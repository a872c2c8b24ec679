"""A folder for the sockets between vLLM's processes: vLLM leaves them where it makes them."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runspec.core.errors import UserError

_VARIABLE = "VLLM_RPC_BASE_PATH"
_PREFIX = "rvllm-"
_LONGEST = 107 - len("/00000000-0000-0000-0000-000000000000")
"""Bytes of a folder's name: a socket's whole name has at most 107, vLLM's part of it 37."""
_starting = threading.Lock()  # the variable is the whole process's


class SocketFolder:
    """A folder that nobody else can enter, made at once, gone after `remove`.

    Raises:
        UserError: it cannot be made, or its name is too long for a socket's.
    """

    def __init__(self) -> None:
        beside = os.environ.get(_VARIABLE) or tempfile.gettempdir()
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=beside))
        except OSError as error:
            raise UserError(
                f"no folder can be made for vLLM's sockets: {error.strerror or error}",
                place=beside,
                remedy=f"mend it, or set {_VARIABLE} to another",
            ) from error
        if len(os.fsencode(self.path)) > _LONGEST:
            self.remove()
            raise UserError(
                f"no socket can lie in a folder whose name has over {_LONGEST} bytes",
                place=str(self.path),
                remedy=f"set TMPDIR or {_VARIABLE} to a shorter one",
            )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """What starts inside the block makes its sockets here; one engine at a time."""
        with _starting:
            before = os.environ.get(_VARIABLE)
            os.environ[_VARIABLE] = str(self.path)
            try:
                yield
            finally:
                if before is None:
                    del os.environ[_VARIABLE]
                else:
                    os.environ[_VARIABLE] = before

    def remove(self) -> None:
        """Removes the folder and the sockets in it; once more is harmless."""
        shutil.rmtree(self.path, ignore_errors=True)


def remove_inherited() -> None:
    """In a process of vLLM's whose front was killed: removes the folder that it was told of."""
    if (path := inherited_folder()) is not None:
        shutil.rmtree(path, ignore_errors=True)


def inherited_folder() -> Path | None:
    """In a process of vLLM's: the folder that its front made; None elsewhere."""
    path = Path(os.environ.get(_VARIABLE, ""))
    return path if path.name.startswith(_PREFIX) else None
