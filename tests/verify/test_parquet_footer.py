"""The footer as we read it: what Arrow wrote, and what Arrow would end the process of."""

from __future__ import annotations

import io
import subprocess
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.verify.coordinator.deployment import rollouts
from verify.formats.lease import Lease
from verify.formats.parquet_footer import MalformedFooter, read_row_groups

LEASE = Lease("tiny", 0, "ab" * 32, "cd" * 32, "near", 0, 2, 0, "ef" * 32, 0.0, 1.0)
FILE = rollouts(LEASE, "ab" * 32)


@pytest.mark.parametrize("version", ["1.0", "2.6"])
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd"])
def test_the_numbers_are_those_that_arrow_reads(version: str, compression: str) -> None:
    table = pq.read_table(io.BytesIO(FILE))
    sink = io.BytesIO()
    pq.write_table(
        pa.concat_tables([table] * 5), sink, row_group_size=7, version=version,
        compression=compression, store_schema=version == "2.6", write_page_index=True,
    )  # fmt: skip
    groups = read_row_groups(sink.getvalue())

    meta = pq.ParquetFile(sink).metadata
    assert len(groups) == meta.num_row_groups == 3
    for index, group in enumerate(groups):
        theirs = meta.row_group(index)
        assert (group.rows, group.bytes) == (theirs.num_rows, theirs.total_byte_size)
        columns = [theirs.column(i) for i in range(theirs.num_columns)]
        assert tuple(chunk.values for chunk in group.chunks) == tuple(
            column.num_values for column in columns
        )


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "not a Parquet file"),
        (b"PAR1PAR1", "not a Parquet file"),
        (FILE[:-1], "not a Parquet file"),
        (b"PAR1\x00\xff\xff\xff\x7fPAR1", "longer than the file"),
        (b"PAR1\x00\x01\x00\x00\x00PAR1", "not a list"),
        (b"PAR1" + b"\x1c" * 99 + b"\x63\x00\x00\x00PAR1", "nested too deeply"),
        (b"PAR1" + b"\x19\x99" * 50 + b"\x64\x00\x00\x00PAR1", "nested too deeply"),
        (b"PAR1\x19\xfc\xff\xff\xff\xff\x0f\x07\x00\x00\x00PAR1", "too many values"),
        (b"PAR1\x16" + b"\xff" * 20 + b"\x15\x00\x00\x00PAR1", "a number without an end"),
        (b"PAR1\x18\x7f\x02\x00\x00\x00PAR1", "ends within a value"),
        (b"PAR1\x1f\x01\x00\x00\x00PAR1", "unknown type 15"),
        (b"PAR1\x15\x00\x05\x02\x00\x00\x06\x00\x00\x00PAR1", "field 1 comes twice"),
    ],
)
def test_other_bytes_are_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(MalformedFooter, match=reason):
        read_row_groups(data)


def test_reading_the_footer_needs_no_arrow() -> None:
    code = "import sys, verify.formats.parquet_footer; sys.exit('pyarrow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
