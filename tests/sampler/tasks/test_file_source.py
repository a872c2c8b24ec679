"""Kinds of files: what one has to say before it is a source."""

from __future__ import annotations

from pathlib import Path

import pytest

from sampler.tasks.sources.file_source import FileSource
from tests.sampler.tasks.row_files import KeepAll, make_rows, source, write_jsonl


def test_a_kind_that_does_not_say_how_its_rows_are_found_cannot_be_made(tmp_path: Path) -> None:
    class Unread(FileSource):
        """It has rows, and no way to them."""

    rows = source("jsonl", write_jsonl(tmp_path / "rows.jsonl", make_rows(1)))
    with pytest.raises(TypeError, match=r"abstract method '?table"):
        Unread(rows, 42, KeepAll())  # type: ignore[abstract]
