"""Rows of JSON Lines files: one object a line."""

from __future__ import annotations

from sampler.tasks.sources.file_source import FileSource


class JsonlSource(FileSource):
    """`kind: jsonl`: one file, a folder of them, or a pattern."""
