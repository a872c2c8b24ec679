"""`python -m verify table`: a submission or verdict file as Parquet, for analysts."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runspec.core.errors import UserError
from runspec.core.files import atomic_file, read_bounded
from verify.formats import submission, verdict
from verify.formats.tables import DTYPES, Column, MalformedTable, Schema
from verify.one_shot import run_once, say

COMMAND = "table"
_MAX_BYTES = 2**31
_CHECKS = "checks."


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds `table` to the commands of `python -m verify`."""
    parser = commands.add_parser(COMMAND, help="write a submission or verdict file as Parquet")
    parser.add_argument("file", type=Path, metavar="FILE", help="of rollouts/step_<s>/")
    parser.add_argument("-o", dest="out", type=Path, required=True, metavar="FILE.parquet")
    parser.set_defaults(body=lambda options: run_once(lambda: _convert(options.file, options.out)))


def _convert(path: Path, out: Path) -> int:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        raise UserError("needs pyarrow", place=COMMAND, remedy="pip install pyarrow") from error
    try:
        data = read_bounded(path, _MAX_BYTES)
        table = _verdicts(data) if ".verdict." in path.name else _rollouts(data)
    except (OSError, MalformedTable) as error:
        raise UserError(
            f"neither a submission nor a verdict file: {error}",
            place=str(path),
            remedy="name a file `<digest>.safetensors` or `<digest>.verdict.safetensors` of a run",
        ) from error
    with atomic_file(out) as file:
        pq.write_table(table, file, compression="zstd")
    say(f"{out}: {len(table)} rows")
    return 0


def _rollouts(data: bytes) -> Any:
    rows = submission.decode_rollouts(data, max_rows=len(data), max_bytes=_MAX_BYTES)
    return _table(rows, submission.SCHEMA)


def _verdicts(data: bytes) -> Any:
    """With the checks of a row as a list of structures."""
    import pyarrow as pa

    rows = verdict.decode_verdicts(data)
    parts = [c for c in verdict.SCHEMA.columns if c.name.startswith(_CHECKS)]
    kind = pa.list_(pa.struct([(c.name.removeprefix(_CHECKS), _value_type(c)) for c in parts]))
    checks = pa.array([[vars(check) for check in row.checks] for row in rows], type=kind)
    return _table(rows, verdict.SCHEMA).append_column("checks", checks)


def _table(rows: Sequence[Any], schema: Schema) -> Any:
    import pyarrow as pa

    arrays = {}
    for column in schema.columns:
        if not column.name.startswith(_CHECKS):
            value = _value_type(column)
            kind = pa.list_(value) if "offsets" in column.steps else value
            arrays[column.name] = pa.array([getattr(r, column.name) for r in rows], type=kind)
    return pa.table(arrays)


def _value_type(column: Column) -> Any:
    import pyarrow as pa

    if "text" in column.steps:
        return pa.string()
    return pa.binary() if column.width > 1 else pa.from_numpy_dtype(DTYPES[column.dtype])
