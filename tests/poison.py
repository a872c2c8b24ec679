"""Parquet that is made to hurt whoever decodes it: sound footers, pages that lie."""

from __future__ import annotations

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verify.formats.submission_columns import SCHEMA

_STOP = b"\x00"
_CODEC = "brotli"
"""Some fifty bytes hold megabytes of zeros."""
_LEAST_FILLER = 11
_INDEX = b"\x15\x02" + b"\x15\x00" + b"\x15\x00" + _STOP  # type 1, and twice a size of 0


def submission_row(**changes: Any) -> dict[str, Any]:
    """A row of a submission, small and sound but for the changes."""
    row: dict[str, Any] = {
        **dict.fromkeys(("run", "worker", "lease", "problem_id", "finish_reason"), "x"),
        **dict.fromkeys(("step", "group", "sample", "version", "top_k"), 1),
        **dict.fromkeys(("temperature", "top_p", "task_reward", "length_penalty"), 1.0),
        "target": None,
        "versions": None,
        "prompt_tokens": [1],
        "output_tokens": [1],
        "logprobs": [-1.0],
        "proofs": [bytes(258)],
    }
    return {**row, **changes}


def inflating_pages(file_bytes: int, page_bytes: int) -> bytes:
    """A file that decompresses without end: each page holds one token, and zeros after it.

    Args:
        file_bytes: size of the file, about.
        page_bytes: what each page decompresses to.
    """

    def page(repetition: int) -> bytes:
        # Repetition levels, definition levels (a run of one each, behind its length), the token.
        run = b"\x02\x00\x00\x00\x02"
        content = run + bytes([repetition]) + run + b"\x01" + b"\x07\x00\x00\x00"
        inflated = content + bytes(page_bytes - len(content))
        packed = pa.compress(inflated, codec=_CODEC, asbytes=True)
        return _page_header(page_bytes, len(packed)) + packed

    return _with_pages("output_tokens", page(1), file_bytes, first=page(0))


def lying_page(claimed_bytes: int) -> bytes:
    """A file of a few kilobytes with a page that says how much it will decompress to."""
    packed = pa.compress(bytes(1000), codec=_CODEC, asbytes=True)
    return _with_pages("output_tokens", _page_header(claimed_bytes, len(packed)) + packed, 4000)


def skipped_pages(file_bytes: int) -> bytes:
    """A file of nothing but pages that are passed over: seven bytes each, one after the other."""
    return _with_pages("output_tokens", _INDEX, file_bytes)


def slow_pages(file_bytes: int) -> bytes:
    """A sound file of one row with one output token, behind which pages are passed over."""
    run = b"\x02\x00\x00\x00\x02"  # as in `inflating_pages`
    content = run + b"\x00" + run + b"\x01" + b"\x07\x00\x00\x00"
    packed = pa.compress(content, codec=_CODEC, asbytes=True)
    first = _page_header(len(content), len(packed)) + packed
    return _with_pages("output_tokens", _INDEX, file_bytes, first=first)


def _with_pages(column: str, page: bytes, size: int, *, first: bytes = b"") -> bytes:
    """A sound file of one row, in which the pages of a list of numbers are exchanged."""
    values = [i * 2654435761 % 2**31 for i in range(size // 4)]  # which no codec makes smaller
    table = pa.Table.from_pylist([submission_row(**{column: values})], schema=SCHEMA)
    sink = io.BytesIO()
    pq.write_table(table, sink, compression=_CODEC, use_dictionary=False, write_statistics=False)
    made = bytearray(sink.getvalue())
    group = pq.ParquetFile(io.BytesIO(bytes(made))).metadata.row_group(0)
    for index in range(group.num_columns):
        chunk = group.column(index)
        if chunk.path_in_schema.startswith(column):
            start, length = chunk.data_page_offset, chunk.total_compressed_size
            pages = first + page * ((length - len(first) - _LEAST_FILLER) // len(page))
            made[start : start + length] = pages + _filler(length - len(pages))
    return bytes(made)


def _filler(size: int) -> bytes:
    """A page of so many bytes in the file that is passed over."""
    left = 2 * (size - _LEAST_FILLER)  # zigzag, then in five bytes whatever it is
    digits = bytes(left >> shift & 127 | 128 * (shift < 28) for shift in range(0, 35, 7))
    return b"\x15\x02" + b"\x15\x00" + b"\x15" + digits + _STOP + bytes(size - _LEAST_FILLER)


def _page_header(size: int, packed: int) -> bytes:
    """Thrift's compact form of a data page (version 1) of one plain value with levels by runs."""
    body = b"".join(b"\x15" + _varint(n) for n in (1, 0, 3, 3))
    return b"\x15\x00\x15" + _varint(size) + b"\x15" + _varint(packed) + b"\x2c" + body + 2 * _STOP


def _varint(number: int) -> bytes:
    number, made = 2 * number, bytearray()  # zigzag of what is not below 0
    while number > 127:
        made.append(number & 127 | 128)
        number >>= 7
    return bytes([*made, number])
