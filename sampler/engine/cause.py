"""Why an engine core does not start: vLLM's front is told no more than that it failed.

The core logs the exception that ends it; a handler beside the log's leaves its words in the folder
that the front made for the core's sockets.
"""

from __future__ import annotations

import logging
from pathlib import Path

from sampler.engine.sockets import inherited_folder

_FILE = "cause"
_LOGGER = "vllm.v1.engine.core"


class _Keeper(logging.Handler):
    """Keeps the words of the last exception that is logged."""

    def __init__(self, folder: Path) -> None:
        super().__init__(logging.ERROR)
        self._file = folder / _FILE

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and (error := record.exc_info[1]) is not None:
            try:
                self._file.write_text(f"{type(error).__name__}: {error}")
            except OSError:  # a full disk, say: logging says so, and the core ends as it would
                self.handleError(record)


def keep_cause() -> None:
    """In an engine core: from now on `read_cause` of its front finds what ends it."""
    if (folder := inherited_folder()) is not None:
        logging.getLogger(_LOGGER).addHandler(_Keeper(folder))


def read_cause(folder: Path) -> str:
    """What ended the core whose sockets lie in a folder; empty where it did not say."""
    file = folder / _FILE
    return file.read_text(errors="replace") if file.exists() else ""
