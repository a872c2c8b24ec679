"""Problems with their solve rates, as a Parquet file that the source `parquet` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from runspec.core.files import atomic_file
from sampler.measuring.progress import Tries
from verify.plugins import TaskSet

_GROUP_ROWS = 1000
_REMEDY = "free disk space or mend the permissions; the same command goes on"
METADATA = b"runspec.solve_rates"
"""Key in the file's schema of what was measured: model, settings, data."""


def write_rows(
    path: Path,
    tasks: TaskSet,
    tries: Mapping[int, Tries],
    *,
    field: str,
    about: Mapping[str, object],
) -> None:
    """Writes problem_id, task_type, prompt, verification_info and the rate, in the order of the
    problems; the file appears whole or not at all.

    Args:
        path: what it becomes.
        tasks: the problems.
        tries: by index; those that are there are written.
        field: the solve rate's column; null where no try could be graded.
        about: kept in the file's metadata.

    Raises:
        UserError: it cannot be written.
    """
    texts = [(name, pa.string()) for name in _TEXTS]
    schema = pa.schema(
        [*texts, (field, pa.float64())],
        metadata={METADATA: json.dumps(about, sort_keys=True).encode()},
    )
    rows = (_row(tasks, tries[index], field) for index in sorted(tries))
    with (
        atomic_file(path, remedy=_REMEDY) as file,
        pq.ParquetWriter(file, schema, compression="zstd") as writer,
    ):
        while group := list(islice(rows, _GROUP_ROWS)):
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


_TEXTS = ("problem_id", "task_type", "prompt", "verification_info")


def _row(tasks: TaskSet, tries: Tries, field: str) -> dict[str, Any]:
    problem = tasks.problem(tries.index)
    info = json.dumps(dict(problem.verification), ensure_ascii=False)
    texts = (problem.problem_id, problem.task_type, problem.prompt, info)
    return {**dict(zip(_TEXTS, texts, strict=True)), field: tries.rate}
