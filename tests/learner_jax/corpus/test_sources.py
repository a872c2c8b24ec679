"""Documents of a spec's sources, and what is said of files that cannot be read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from learner_jax.corpus.documents import Counts
from learner_jax.corpus.sources import Row, read_rows
from runspec.core.errors import UserError
from runspec.core.spec.schema import Source

TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def read(
    path: Path, kind: str, algorithm: str = "pretrain", counts: Counts | None = None, **params: Any
) -> list[Row]:
    source = Source(name="mine", kind=kind, uri=str(path), params=params)
    return list(read_rows(source, [path], counts or Counts(), algorithm))


def test_a_text_file_is_lines_or_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntw\u00f6\n")
    counts = Counts()
    assert read(path, "text", counts=counts) == [(f"{path}:1", "one"), (f"{path}:3", "tw\u00f6")]
    assert (counts.documents, counts.empty) == (2, 1)
    assert read(path, "text", whole=True) == [(str(path), "one\n\ntw\u00f6")]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_hold_text_ids_or_conversations(tmp_path: Path, kind: str) -> None:
    # given the same two rows as JSON lines and as Parquet, each with an empty list beside them
    rows = [
        {"text": "one", "ids": [5, 6], "messages": TALK},
        {"text": "b", "ids": [7], "messages": []},
    ]
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    # when each column is read
    texts = [row.value for row in read(path, kind)]
    ids = [row.value for row in read(path, kind, tokens="ids", id_offset=-1)]
    counts = Counts()
    talks = read(path, kind, "sft", counts)
    # then text is what pretraining reads, and conversations are what fine-tuning reads
    assert texts == ["one", "b"]
    np.testing.assert_array_equal(np.concatenate(ids), [4, 5, 6])
    assert [row.value for row in talks] == [TALK]
    assert (counts.documents, counts.empty) == (1, 1)
    assert talks[0].place == (f"{path}:1" if kind == "jsonl" else f"{path}, row 1")
    # and a named column has precedence
    assert [row.value for row in read(path, kind, "sft", text="text")] == ["one", "b"]


def test_a_field_that_parquet_fills_with_null_is_absent(tmp_path: Path) -> None:
    calls = [{"name": "add", "arguments": "{}"}]
    talk = [TALK[0], {"role": "assistant", "content": None, "tool_calls": calls}]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([{"messages": talk}]), path)
    assert [row.value for row in read(path, "parquet", "sft")] == [talk]


LINE = b'{"messages": [{"role": "user", "content": "hi"}]}\n'


@pytest.mark.parametrize(
    ("name", "content", "params", "place", "said"),
    [
        ("a.txt", b"", {}, "a.txt", "holds no document"),
        ("a.txt", b"\n", {"whole": True}, "a.txt", "holds no document"),
        ("a.jsonl", b"", {"messages": "messages"}, "a.jsonl", "holds no document"),
        ("a.jsonl", b'{"messages": []}\n', {"messages": "messages"}, "a.jsonl", "no document"),
        ("a.txt", b"one\ncaf\xe9\n", {}, "a.txt:2", "not UTF-8: byte 0xe9 at column 4"),
        ("a.txt", b"one\ncaf\xe9\n", {"whole": True}, "a.txt:2", "not UTF-8"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', {}, "a.jsonl:1", "not a JSON object"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', {}, "a.jsonl:1", "surrogates not allowed"),
        ("a.jsonl", LINE + b'{"messages": [', {"messages": "messages"}, "a.jsonl:2", "JSON"),
        ("a.jsonl", b'{"m": [{"content": "x"}]}', {"messages": "m"}, "a.jsonl:1", "a role"),
        ("a.jsonl", b'{"m": "hi"}', {"messages": "m"}, "a.jsonl:1", "no list of messages"),
        ("a.jsonl", LINE, {"messages": "talk"}, "a.jsonl:1", "'talk' holds no list of messages"),
        ("a.jsonl", b'{"ids": [1, 2.5]}', {"tokens": "ids"}, "a.jsonl:1", "no list of token ids"),
        ("a.jsonl", b'{"ids": [%d]}' % 10**30, {"tokens": "ids"}, "a.jsonl:1", "no list of token"),
        ("a.parquet", b"", {}, "a.parquet", "not readable as Parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, params: dict[str, Any], place: str, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    kind = {"txt": "text"}.get(name[2:], name[2:])
    with pytest.raises(UserError, match=said) as error:
        read(tmp_path / name, kind, **params)
    assert (error.value.place, bool(error.value.remedy)) == (str(tmp_path / place), True)


@pytest.mark.parametrize("params", [{}, {"messages": "messages"}], ids=["text", "messages"])
def test_a_gzip_that_ends_too_early_is_damaged(tmp_path: Path, params: dict[str, str]) -> None:
    draw = np.random.default_rng(1)
    lines = (
        json.dumps({"text": text, "messages": [{"role": "user", "content": text}]})
        for text in draw.bytes(40_000).hex(" ", 20).split()
    )
    whole = gzip.compress("\n".join(lines).encode())
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"damaged gzip after document \d\d+") as error:
        read(path, "jsonl", **params)
    assert error.value.place == str(path)


@pytest.mark.parametrize("column", ["text", "messages"])
def test_a_parquet_file_of_invalid_text_or_without_the_column(tmp_path: Path, column: str) -> None:
    # given text that is not UTF-8, which Arrow does not check
    raw = pa.array([b"caf\xe9"]).cast(pa.binary())
    invalid = pa.StringArray.from_buffers(1, raw.buffers()[1], raw.buffers()[2])
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": invalid}), path)
    said = "not readable as Parquet: 'utf-8'" if column == "text" else "has no column 'messages'"
    with pytest.raises(UserError, match=said) as error:
        read(path, "parquet", **{column: column})
    assert error.value.place == str(path)
