"""Names of the learner's files in a version's folder. No JAX: the publisher reads this too."""

from __future__ import annotations

import logging
import shutil

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


def remove_entry(path: Folder) -> None:
    """Removes a version or a full state; a removal cut short leaves nothing that looks like one."""
    if isinstance(path, ObjectPath):
        path.remove()
        return
    doomed = path.with_name(f".tmp-removed-{path.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    # A learner that starts meanwhile clears unfinished things out of the same folder.
    shutil.rmtree(doomed, ignore_errors=True)
