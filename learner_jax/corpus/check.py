"""`python -m learner_jax check`: opens the documents of a run before a role starts."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from learner_jax.corpus.documents import Counts
from learner_jax.corpus.generated import GeneratedReads
from learner_jax.corpus.sources import read_rows
from runspec.core.errors import UserError
from runspec.core.spec.resolved import load_resolved
from runspec.core.spec.schema import RunSpec, Source
from runspec.core.spec.source_files import is_generated, source_files

MAX_FAULTS = 20
MAX_CHARS = 1000
_PROGRESS_S = 5.0
_log = logging.getLogger(__name__)
"""`runspec.local.problems` shows the lines of this log as progress."""


def check_documents(spec: RunSpec) -> tuple[list[UserError], list[str]]:
    """Read the first document of every file of a run's sources.

    Returns:
        What the run lacks, `place` a path of the spec; and a line for each source.
    """
    faults, notes = list[UserError](), list[str]()
    for source in spec.data.sources:
        place = f"data.sources.{source.name}"
        _log.info("source %s", source.name)
        try:
            notes.append(f"source {source.name}: {_open(source, spec.algorithm.kind)}")
        except UserError as error:
            inside = error.place.startswith("data.") or not error.place
            thing = error.thing if inside else f"{error.place}: {error.thing}"
            where = error.place if error.place.startswith("data.") else place
            faults.append(UserError(thing[:MAX_CHARS], place=where, remedy=error.remedy))
    return faults[:MAX_FAULTS], notes


def _open(source: Source, kind: str) -> str:
    """Open a source; return what it holds in words.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    if is_generated(source):
        reads = GeneratedReads.of(source.params)
        next(reads.documents())
        return f"{reads.reads:,} generated reads of {reads.length} bases"
    files = source_files(source)
    for path in _reported(list(files.values())):
        next(read_rows(source, [path], Counts(), kind))
    size = sum(path.stat().st_size for path in files.values())
    return f"{len(files)} file{'s' if len(files) > 1 else ''}, {size:,} bytes"


def _reported(files: list[Path]) -> Iterator[Path]:
    """Yield the files, and log how many every few seconds."""
    logged = time.monotonic()
    for number, path in enumerate(files):
        yield path
        if time.monotonic() - logged > _PROGRESS_S:
            logged = time.monotonic()
            _log.info("opened %d of %d files", number + 1, len(files))


def check_command(folder: Path) -> None:
    """Print what was found as a JSON object: `faults`, each `place`, `thing`, `remedy`; `notes`."""
    faults, notes = check_documents(load_resolved(folder))
    found = [{"place": f.place, "thing": f.thing, "remedy": f.remedy} for f in faults]
    json.dump({"faults": found, "notes": notes}, sys.stdout)
