"""Names of the learner's files in a version's folder. No JAX: the publisher reads this too."""

from __future__ import annotations

import logging

from runspec.core.files import remove_leftovers
from runspec.core.object_store import Folder, ObjectPath

PARAMS_NAME = "params"
"""The Orbax checkpoint in v<N>/."""
PROBE_FILE = "probe.json"
"""Beside it."""


def clear_unfinished(folder: Folder, log: logging.Logger) -> None:
    """Removes what a killed process had not finished writing, and says so."""
    if isinstance(folder, ObjectPath):
        for name in folder.unfinished():
            log.info("%s was never finished: removed", folder / name)
            (folder / name).remove()
        return
    for entry in sorted(folder.glob(".tmp-*")):
        log.info("%s was never finished: removed", entry)
    remove_leftovers(folder)
