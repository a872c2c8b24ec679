"""Which rows of a source are kept: looked through once, remembered on disk by what decides it."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.hashing import hash_parts
from runspec.core.spec.schema import Source
from runspec.core.spec.source_files import file_digest
from sampler.tasks.interfaces import Keep, Part
from sampler.tasks.sources.rows import RowReader, Table
from verify.plugins import Problem

_log = logging.getLogger(__name__)
_PROGRESS_S = 5.0
_MAX_CACHED_BYTES = 1 << 32
_VERSION = "kept rows 4"


@dataclass(frozen=True)
class Kept:
    """The rows that belong to a run."""

    rows: np.ndarray
    """u32 [n]: their numbers, ascending."""
    task_types: list[str]
    """Of these rows, sorted."""
    summary: str
    """How many rows are kept, and how many are left out for what reason."""


_SAID: Mapping[Part, str] = {
    "train": "to train on",
    "held_out": "held out",
    "over_long": "over-long",
}
_REMEDIES = {
    "over_long": "raise data.max_prompt_tokens",
    "off_rate": "widen solve_rate",
    "no_rate": "measure solve rates (`python -m sampler solve-rates`)",
}


def kept_rows(
    source: Source, files: Mapping[str, Path], table: Table, rows: RowReader, keep: Keep
) -> Kept:
    """The rows with a solve rate in bounds that `keep` accepts; the same in every process.

    The cache lies in `$XDG_CACHE_HOME/runspec/problems` (`~/.cache`), a file for each set of
    (file contents, columns, filters, tokenizer, template, targets). Without one it works too.

    Raises:
        UserError: a malformed row, two equal ids, or no row is left.
    """
    key = hash_parts(
        *(_VERSION, source.kind, source.name),
        *(file_digest(path) for path in files.values()),
        source.model_dump_json(include={"params", "task_types", "solve_rate"}),
        keep.digest,
    ).hex()
    path = _cache_path(key)
    kept = None if path is None else _read(path, len(table))
    if kept is None:
        kept = _look_through(source, table, rows, keep)
        if path is not None:
            _write(path, kept)
    _log.info("source %s: %s", source.name, kept.summary)
    return kept


def _look_through(source: Source, table: Table, rows: RowReader, keep: Keep) -> Kept:
    said = time.monotonic()
    looked_at, kept, counts = 0, list[int](), Counter[str]()
    types, ids = set[str](), dict[bytes, int]()
    bounds = source.solve_rate
    for batch in table.batches():
        problems: list[tuple[int, Problem]] = []
        for number, row in enumerate(batch, start=looked_at):
            place = table.place(number)
            problem = rows.problem(row, number, place)
            _refuse_second(ids, problem.problem_id, number, table)
            rate = rows.rate(row, place)
            if bounds is not None and rate is None:
                counts["no_rate"] += 1
            elif bounds is not None and rate is not None and not bounds.min <= rate <= bounds.max:
                counts["off_rate"] += 1
            else:
                problems.append((number, problem))
        looked_at += len(batch)
        parts = keep.parts([problem.prompt for _, problem in problems])
        counts.update(parts)
        for (number, problem), part in zip(problems, parts, strict=True):
            if part == keep.wanted:
                kept.append(number)
                types.add(problem.task_type)
        if time.monotonic() - said > _PROGRESS_S:
            said = time.monotonic()
            _log.info("source %s: %d of %d rows looked at", source.name, looked_at, len(table))
    summary = ", ".join(f"{counts[part]} {_SAID[part]}" for part in keep.known)
    if bounds is not None:
        summary += (
            f", {counts['off_rate']} left out by their solve rate, {counts['no_rate']} without one"
        )
    if not kept:
        remedies = [remedy for cause, remedy in _REMEDIES.items() if counts[cause]]
        raise UserError(
            f"no problem is left: {summary}",
            place=f"data.sources.{source.name}",
            remedy=", or ".join(remedies)
            or "add problems: a run with a warm start holds a tenth of them out",
        )
    return Kept(np.array(kept, dtype=np.uint32), sorted(types), summary)


def _refuse_second(ids: dict[bytes, int], problem_id: str, number: int, table: Table) -> None:
    """Ids are kept as 16 bytes of their hash: of long ones only that much is held."""
    first = ids.setdefault(hash_parts(problem_id)[:16], number)
    if first != number:
        raise UserError(
            f"problem_id {problem_id[:80]!r} is that of {table.place(first)} too",
            place=table.place(number),
            remedy="give every problem an id of its own",
        )


def _cache_path(key: str) -> Path | None:
    """Where the rows of a key are remembered; None where no cache can be."""
    said = os.environ.get("XDG_CACHE_HOME", "")
    try:
        root = Path(said) if Path(said).is_absolute() else Path.home() / ".cache"
    except RuntimeError:
        return None
    return root / "runspec" / "problems" / key


def _write(path: Path, kept: Kept) -> None:
    """A zip of two arrays, whose checksums show damage."""
    file = BytesIO()
    np.savez(
        file, rows=kept.rows, task_types=np.array(kept.task_types), summary=np.array(kept.summary)
    )
    try:
        write_atomic(path, file.getvalue())
    except UserError as error:
        _log.warning("which problems are kept is not remembered: %s", error)


def _read(path: Path, rows: int) -> Kept | None:
    """What was remembered; None where nothing was, or what is there is not whole."""
    try:
        data = read_bounded(path, _MAX_CACHED_BYTES)
    except (OSError, UserError):
        return None
    try:
        with np.load(BytesIO(data), allow_pickle=False) as file:
            kept = Kept(file["rows"], file["task_types"].tolist(), str(file["summary"]))
        if len(kept.rows) and kept.rows[-1] < rows:
            return kept
        damage = "rows that the files have not"
    except (ValueError, KeyError, EOFError, RuntimeError, BadZipFile) as error:
        damage = str(error)
    _log.warning("%s is damaged (%s): the rows are looked through again", path, damage)
    return None
