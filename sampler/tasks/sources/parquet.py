"""Rows of Parquet files, read one row group at a time."""

from __future__ import annotations

from sampler.tasks.sources.file_source import FileSource


class ParquetSource(FileSource):
    """`kind: parquet`: one file, a folder of shards, or a pattern."""

    form = "parquet"
