"""A folder for the sockets between vLLM's processes, which vLLM leaves where it makes them.

An engine core that does not start leaves its last words there, too: its front is told no more than
that it failed. The core logs the exception that ends it; a handler beside the log's keeps it.
"""

from __future__ import annotations

import logging
import os
import secrets
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from runspec.core.errors import UserError

_VARIABLE = "VLLM_RPC_BASE_PATH"
_CAUSE = "cause"
_CORE_LOGGER = "vllm.v1.engine.core"
_PREFIX = "rvllm-"
_LONGEST = 107 - len("/00000000-0000-0000-0000-000000000000")
"""Bytes of a folder's name: a socket's whole name has at most 107, vLLM's part of it 37."""
_REMOVE = """trap "" TERM
read -r _
for _ in 1 2 3 4 5; do rm -rf -- "$0" && break; done"""
"""A shell's: it removes a folder once its input ends, again where a process of vLLM's that is about
to end puts another socket there."""
_starting = threading.Lock()  # the variable is the whole process's


class SocketFolder:
    """A folder that nobody else can enter, gone after `remove`, or when this process has ended.

    Raises:
        UserError: it cannot be made, or its name is too long for a socket's.
    """

    def __init__(self) -> None:
        beside = os.environ.get(_VARIABLE) or tempfile.gettempdir()
        self.path = Path(beside, f"{_PREFIX}{secrets.token_hex(4)}")
        if len(os.fsencode(self.path)) > _LONGEST:
            raise UserError(
                f"no socket can lie in a folder whose name has over {_LONGEST} bytes",
                place=str(self.path),
                remedy=f"set TMPDIR or {_VARIABLE} to a shorter one",
            )
        self._remover = subprocess.Popen(
            ["/bin/sh", "-c", _REMOVE, str(self.path)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            self.path.mkdir(mode=0o700)
        except OSError as error:
            self.remove()
            raise UserError(
                f"no folder can be made for vLLM's sockets: {error.strerror or error}",
                place=beside,
                remedy=f"mend it, or set {_VARIABLE} to another",
            ) from error

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
        self._remover.communicate()


class _Keeper(logging.Handler):
    """Keeps the words of the last exception that is logged."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = folder / _CAUSE

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and (error := record.exc_info[1]) is not None:
            try:
                self._file.write_text(f"{type(error).__name__}: {error}")
            except OSError:  # a full disk, say: logging says so, and the core ends as it would
                self.handleError(record)


def keep_cause() -> None:
    """In an engine core: from now on `read_cause` of its front finds what ends it."""
    folder = Path(os.environ.get(_VARIABLE, ""))
    if folder.name.startswith(_PREFIX):
        logging.getLogger(_CORE_LOGGER).addHandler(_Keeper(folder))


def read_cause(folder: Path) -> str:
    """What ended the core whose sockets lie in a folder; empty where it did not say."""
    file = folder / _CAUSE
    return file.read_text(errors="replace") if file.exists() else ""
