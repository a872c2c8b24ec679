"""What pages take, by their headers, before anything is decompressed; and texts of a dictionary."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.fuzz.tables import variants
from tests.poison import lying_page
from verify.formats.parquet_footer import ColumnChunk, RowGroup, read_row_groups
from verify.formats.parquet_pages import MalformedPages, decompressed_bytes
from verify.formats.tables import MalformedTable, decode_table
from verify.formats.verdict import CheckResult, RolloutVerdict, decode_verdicts, encode_verdicts

TABLE = pa.table({"n": list(range(3000)), "t": ["a", "bc", None] * 1000, "l": [[1, 2], []] * 1500})


@pytest.mark.parametrize("number", range(len(variants(TABLE))))
def test_honest_pages_take_what_the_footer_says_but_for_their_headers(number: int) -> None:
    file = variants(TABLE)[number]
    groups = read_row_groups(file)
    said = sum(group.bytes for group in groups)
    pages = decompressed_bytes(file, groups)
    headers = said - pages
    chunks = sum(len(group.chunks) for group in groups)
    assert pages > 0 and 10 * chunks < headers < said / 2 + 150 * chunks


def test_uncompressed_pages_are_the_file_without_headers() -> None:
    sink = io.BytesIO()
    one = pa.table({"n": pa.array(range(100), pa.int64())})
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(one, sink, **plain)
    # definition levels (behind their length, a run of 100 ones), then the numbers
    assert decompressed_bytes(sink.getvalue(), read_row_groups(sink.getvalue())) == 4 + 3 + 800


def test_a_row_group_without_rows_has_no_pages_to_look_for() -> None:
    sink = io.BytesIO()
    pq.write_table(TABLE.slice(0, 0), sink)
    assert decompressed_bytes(sink.getvalue(), read_row_groups(sink.getvalue())) == 0


def test_a_page_that_claims_more_than_its_column_is_counted_as_it_claims() -> None:
    file = lying_page(2**31 - 1)
    groups = read_row_groups(file)
    assert sum(group.bytes for group in groups) < 10_000
    assert decompressed_bytes(file, groups) > 2**31 - 1


@pytest.mark.parametrize(
    ("pages", "chunk", "reason"),
    [
        (b"", ColumnChunk(1, 4, 9), "longer than the file"),
        (b"\x15\x00\x00", ColumnChunk(1, 4, 3), "field 2 is not a count"),
        (b"\x15\x00\x15\x01\x15\x00\x00", ColumnChunk(1, 4, 7), "field 2 is not a count"),
        (b"\x15\x00\x15\x02\x15\x04\x00x", ColumnChunk(1, 4, 8), "longer than its column"),
        (b"\x15\x00\x15\x02\x15", ColumnChunk(1, 4, 5), "ends within a value"),
        (b"\0" * 9, ColumnChunk(1, 4, 9), "field 2 is not a count"),
    ],
)
def test_what_is_no_row_of_pages_is_refused(pages: bytes, chunk: ColumnChunk, reason: str) -> None:
    with pytest.raises(MalformedPages, match=reason):
        decompressed_bytes(b"PAR1" + pages, [RowGroup(1, 1, (chunk,))])


def test_chunks_that_share_their_pages_do_not_make_them_be_read_without_end() -> None:
    page = b"\x15\x00\x15\x02\x15\x00\x00"
    chunk = ColumnChunk(1, 4, 7 * 1000)
    with pytest.raises(MalformedPages, match="too many values"):
        decompressed_bytes(b"PAR1" + page * 1000, [RowGroup(1, 1, (chunk,) * 1000)])


def test_files_that_arrow_reads_past_a_columns_end_are_refused() -> None:
    file = variants(TABLE)[0].replace(b"parquet-cpp-arrow version ", b"Parquet-MR version 1.2.0 ;")
    with pytest.raises(MalformedTable, match="past a column's end"):
        decode_table(file, TABLE.schema, max_rows=3000, max_bytes=1 << 20)


def verdict_row(row: int, checks: list[CheckResult], **changes: Any) -> RolloutVerdict:
    numbers = {"task_reward": 1.0, "length_penalty": 0.0, "reward": 1.0, "length": 3}
    fields: dict[str, Any] = {"target": None, "logprobs": None, "logprob_diff": None}
    return RolloutVerdict("ab" * 32, row, 0, **{**numbers, **fields, **changes}, checks=checks)


def test_a_text_that_a_dictionary_repeats_is_counted_each_time_and_never_written_out() -> None:
    # given a verdict of some kilobytes, one of whose texts is named two thousand times
    long = CheckResult("x", False, 1.0, 0.0, "y" * 200_000)
    file = encode_verdicts([verdict_row(0, []), verdict_row(1, [long] * 2000)])
    assert len(file) < 10_000
    # when it is read, then it is refused
    held = pa.total_allocated_bytes()
    with pytest.raises(MalformedTable, match="decodes to more than the"):
        decode_verdicts(file)
    assert pa.total_allocated_bytes() == held


def test_texts_in_several_row_groups_are_those_that_were_written() -> None:
    # given a verdict whose texts differ from row group to row group
    rows = [verdict_row(r, [CheckResult(f"c{r % 5}", True, r, 1.0, "z" * r)]) for r in range(200)]
    written = pq.read_table(io.BytesIO(encode_verdicts(rows)))
    sink = io.BytesIO()
    pq.write_table(written, sink, row_group_size=30, dictionary_pagesize_limit=64)
    # when it is read, then they are its own
    assert [row.checks for row in decode_verdicts(sink.getvalue())] == [row.checks for row in rows]


def test_a_column_that_ends_early_does_not_shorten_the_table() -> None:
    # given a column whose page says that it has no values, where there are three rows
    sink = io.BytesIO()
    table = pa.table({"a": [1, 2, 3], "b": [1.0, None, 2.0]})
    pq.write_table(table, sink, compression="none", use_dictionary=False, write_statistics=False)
    file = bytearray(sink.getvalue())
    page = pq.ParquetFile(sink).metadata.row_group(0).column(1).data_page_offset
    file[file.index(b"\x15\x06", page) + 1] = 0  # its values, zigzag
    # when Arrow reads it, then it has no rows, and says nothing
    assert list(pq.ParquetFile(pa.BufferReader(bytes(file))).iter_batches()) == []
    # and we say something
    with pytest.raises(MalformedTable, match="other rows than the file says"):
        decode_table(bytes(file), table.schema, max_rows=3, max_bytes=1 << 20)
