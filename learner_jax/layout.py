"""Where the learner's files lie in a run directory. No JAX here: the publisher reads this too."""

from __future__ import annotations

import logging
from pathlib import Path

from runspec.core.files import remove_leftovers
from runspec.core.spec.run_files import (
    initial_model,
    numbered,
    params_folder,
    state_folder,
    versions_in,
    weights_folder,
)

__all__ = [
    "PARAMS_NAME",
    "PROBE_FILE",
    "clear_unfinished",
    "initial_model",
    "numbered",
    "params_folder",
    "state_folder",
    "versions_in",
    "weights_folder",
]

PARAMS_NAME = "params"
"""The Orbax checkpoint in v<N>/."""
PROBE_FILE = "probe.json"
"""Beside it."""


def clear_unfinished(folder: Path, log: logging.Logger) -> None:
    """Removes what a killed process had not finished writing, and says so."""
    for entry in sorted(folder.glob(".tmp-*")):
        log.info("%s was never finished: removed", entry)
    remove_leftovers(folder)
