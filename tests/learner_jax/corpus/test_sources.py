"""Documents of text, JSON lines, Parquet, FASTA and FASTQ, and what is said of bad files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from learner_jax import corpus
from learner_jax.corpus import Counts, Document, kind_of, read_documents
from learner_jax.corpus.sources import Conversation, check_documents, read_rows
from runspec.core.errors import UserError
from runspec.core.schema import RunSpec, Source
from tests.runspec.core.schema.spec_files import DOCUMENTS, load


def texts(path: Path, counts: Counts | None = None) -> list[str]:
    """What `read_documents` finds."""
    return [document.value for document in read_documents(path, counts or Counts())]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.txt", "one\r\ntw\u00f6\nthree".encode(), ["one", "tw\u00f6", "three"]),
        ("a.jsonl", b'{"text": "one"}\n{"text": "a\\nb", "more": 1}\n', ["one", "a\nb"]),
        ("a.fa", b">one of them\nACGT\nNN\n>two\nTTT\n", ["ACGTNN", "TTT"]),
        ("a.fastq", b"@one\nACGT\n+\n!!!!\n@two\nGG\n+two\n@+\n", ["ACGT", "GG"]),
    ],
)
def test_documents_come_in_order_plain_or_gzip(
    tmp_path: Path, name: str, suffix: str, data: bytes, expected: list[str]
) -> None:
    assert texts(write(tmp_path / (name + suffix), data)) == expected


def test_a_document_has_the_name_of_its_record_or_its_line(tmp_path: Path) -> None:
    fasta = write(tmp_path / "a.fa", b">one of them\nACGT\n>two\tx\nA\n")
    text = write(tmp_path / "a.txt", b"one\n\nthree\n")
    names = [[d.name for d in read_documents(path, Counts())] for path in (fasta, text)]
    assert names == [["one", "two"], ["1", "3"]]


def test_a_name_says_its_kind() -> None:
    names = ["a.fna.gz", "a.FQ", "a.jsonl.gz", "a.parquet", "a.txt", "a"]
    kinds = ["fasta", "fastq", "jsonl", "parquet", "text", "text"]
    assert [kind_of(Path(name)) for name in names] == kinds


def test_bases_are_normalised_and_what_was_changed_is_counted(tmp_path: Path) -> None:
    # given lower case, RNA and ambiguous codes, and a record without bases
    path = write(tmp_path / "a.fa", b">one\nacGU\nRyN\n>empty\n>two\nAC\n")
    counts = Counts()
    # when it is read
    found = texts(path, counts)
    # then there are upper-case bases of DNA, and the changes are counted
    assert found == ["ACGTNNN", "AC"]
    assert (counts.lower_case, counts.uracil, counts.ambiguous, counts.empty) == (3, 1, 2, 1)
    assert str(counts) == (
        "2 documents of 9 characters, 1 empty ones left out, 3 bases raised from lower case, "
        "1 U read as T, 2 ambiguous bases read as N"
    )


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.txt", b"\n\n", "a.txt: holds no document"),
        ("a.txt", b"fine\nbad \xff\n", "a.txt:2: not UTF-8: byte 0xff at column 5"),
        ("a.jsonl", b'{"body": "x"}\n', "a.jsonl:1: 'text' holds NoneType"),
        ("a.parquet", b"no such thing", "a.parquet: cannot be read as Parquet"),
        ("a.fa", b"ACGT\n", "a.fa:1: not FASTA"),
        ("a.fa", b">one\nAC-GT\n", "a.fa:2: '-' at column 3 is no code of a nucleotide"),
        ("a.fq", b"@one\nACGT\n+\n!!!\n", "a.fq:1: not FASTQ"),
        ("a.fq", b"@one\nAC\n+\n!!\n@two\nAC\n", "a.fq:5: not FASTQ"),
        ("a.fq", b"@one\nAXC\n+\n!!!\n", "a.fq:2: 'X' at column 2"),
    ],
)
def test_a_bad_file_is_named_with_the_line(
    tmp_path: Path, name: str, data: bytes, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        texts(write(tmp_path / name, data))
    assert f"{tmp_path}/{message}" in str(caught.value)
    assert "remedy: " in str(caught.value)


def test_a_gzip_that_is_cut_off_is_named_after_its_last_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one\n" * 100_000)[:-20])
    with pytest.raises(UserError, match=r"a\.txt\.gz: damaged gzip after line \d+"):
        texts(path)


@pytest.mark.parametrize(
    ("name", "data"), [("a.txt", b"x" * 33), ("a.fa", b">a\n" + b"ACG\n" * 11)]
)
def test_a_document_over_the_limit_is_refused_before_it_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes
) -> None:
    monkeypatch.setattr(corpus, "MAX_DOCUMENT_BYTES", 32)
    with pytest.raises(UserError, match="more than 32 bytes"):
        texts(write(tmp_path / name, data))


TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]


def read(
    path: Path, kind: str, algorithm: str = "pretrain", counts: Counts | None = None, **params: Any
) -> list[Document]:
    source = Source(name="mine", kind=kind, uri=str(path), params=params)
    return list(read_rows(source, [path], counts or Counts(), algorithm))


def test_a_text_file_is_lines_or_one_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntw\u00f6\n")
    counts = Counts()
    found = [(row.place, row.value) for row in read(path, "text", counts=counts)]
    assert found == [(f"{path}:1", "one"), (f"{path}:3", "tw\u00f6")]
    assert (counts.documents, counts.empty) == (2, 1)
    [whole] = read(path, "text", whole=True)
    assert (whole.place, whole.value) == (str(path), "one\n\ntw\u00f6")


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
    assert [row.value for row in talks] == [Conversation(TALK)]
    assert (counts.documents, counts.empty) == (1, 1)
    assert talks[0].place == (f"{path}:1" if kind == "jsonl" else f"{path}, row 1")
    # and a named column has precedence
    assert [row.value for row in read(path, kind, "sft", text="text")] == ["one", "b"]


def call(**arguments: Any) -> dict[str, Any]:
    """A message of the assistant's, which calls a tool and says nothing."""
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"function": function}]}


def tool(**properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def test_a_field_that_parquet_fills_with_null_is_absent_at_every_depth(tmp_path: Path) -> None:
    # given rows of which each has fields that the others lack
    named = {**TALK[0], "name": "me"}
    rows: list[dict[str, Any]] = [
        {"messages": [named, call(city="Oslo", at=[{"x": 1}, None])], "tools": [tool(city=1)]},
        {"messages": [*TALK, call(a=2, at=[{"y": {"z": 3}}])], "tools": [tool(a={"b": "c"})]},
        {"messages": TALK},
    ]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    # then each is as it was written, with null where a list holds it
    found = [Conversation(row["messages"], row.get("tools")) for row in rows]
    assert [row.value for row in read(path, "parquet", "sft")] == found


def test_a_null_within_a_json_line_is_its_authors(tmp_path: Path) -> None:
    row = {"messages": [*TALK, call(a=None, b=[{"c": None}])], "tools": [tool(a={"default": None})]}
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    [found] = read(tmp_path / "a.jsonl", "jsonl", "sft")
    assert found.value == Conversation(row["messages"], row["tools"])


@pytest.mark.parametrize(
    ("tools", "expected"),
    [
        ([tool(a={})], [tool(a={})]),
        (json.dumps([tool(a=None)]), [tool(a=None)]),
        *((none, None) for none in (None, [], "", " ", "[]", "null")),
        *((bad, "it is of type") for bad in (7, "{}", {"name": "f"}, "7")),
        *((bad, "an element is") for bad in (["f"], [[]], '["f"]')),
        *((bad, "") for bad in ("a tool", '[{"name": ', '[{"a": "\\ud8aa"}]')),
    ],
)
def test_tools_are_a_list_of_objects_or_json_text_of_one(
    tmp_path: Path, tools: object, expected: Any
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": TALK, "tools": tools}))
    if not isinstance(expected, str):
        assert [row.value for row in read(path, "jsonl", "sft")] == [Conversation(TALK, expected)]
        return
    with pytest.raises(UserError, match=f"or JSON text of one: {expected}") as error:
        read(path, "jsonl", "sft")
    assert error.value.place == f"{path}:1"


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ({"role": "assistant", "content": None}, "'assistant', has neither content nor tool_calls"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "neither content nor"),
        ({"role": "assistant", "tool_calls": None}, "neither content nor"),
        ({"role": "user", "content": None}, "'user', has neither"),
        ({"role": "tool", "content": None, "tool_calls": call()["tool_calls"]}, "neither"),
        ({"role": "user", "content": 4}, "content of type int"),
        ({"role": "user", "content": False}, "content of type bool"),
        ({"role": "user", "content": {"type": "text", "text": "4"}}, "content of type dict"),
        ({"role": "user", "content": ["4"]}, "a part of type 'str'"),
        ({"role": "user", "content": [{"text": "4"}]}, "a part of type None"),
        ({"role": "user", "content": [{"type": "text", "text": 4}]}, "'text' without a text"),
        (
            {"role": "user", "content": [{"type": "text", "text": "4"}, {"type": "image_url"}]},
            "a part of type 'image_url'",
        ),
    ],
)
def test_a_message_without_text_is_named(
    tmp_path: Path, message: dict[str, Any], said: str
) -> None:
    rows = [{"messages": TALK}, {"messages": [TALK[0], message]}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(UserError, match=f"message 2 of 'messages', of role .*{said}") as error:
        read(path, "jsonl", "sft")
    assert error.value.place == f"{path}:2"


LINE = b'{"messages": [{"role": "user", "content": "hi"}]}\n'


@pytest.mark.parametrize(
    ("name", "content", "params", "place", "said"),
    [
        ("a.txt", b"\n", {"whole": True}, "a.txt", "holds no document"),
        ("a.jsonl", b'{"messages": []}\n', {"messages": "messages"}, "a.jsonl", "no document"),
        ("a.txt", b"one\ncaf\xe9\n", {"whole": True}, "a.txt:2", "not UTF-8"),
        ("a.jsonl", b'{"text": "caf\xe9"}\n', {}, "a.jsonl:1", "not a JSON object"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', {}, "a.jsonl:1", "surrogates not allowed"),
        ("a.jsonl", LINE + b'{"messages": [', {"messages": "messages"}, "a.jsonl:2", "JSON"),
        ("a.jsonl", b'{"m": [{"content": "x"}]}', {"messages": "m"}, "a.jsonl:1", "a role"),
        ("a.jsonl", b'{"ids": 3}', {"tokens": "ids"}, "a.jsonl:1", "no list of token ids"),
        ("a.jsonl", b'["text"]', {}, "a.jsonl:1", "it is of type list"),
        ("a.jsonl", b'{"m": "hi"}', {"messages": "m"}, "a.jsonl:1", "no list of messages"),
        ("a.jsonl", LINE, {"messages": "talk"}, "a.jsonl:1", "'talk' holds no list of messages"),
        ("a.jsonl", b'{"ids": [1, 2.5]}', {"tokens": "ids"}, "a.jsonl:1", "no list of token ids"),
        ("a.jsonl", b'{"ids": [%d]}' % 10**30, {"tokens": "ids"}, "a.jsonl:1", "no list of token"),
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


@pytest.mark.parametrize("column", ["text", "messages"])
def test_a_parquet_file_of_invalid_text_or_without_the_column(tmp_path: Path, column: str) -> None:
    # given text that is not UTF-8, which Arrow does not check
    raw = pa.array([b"caf\xe9"]).cast(pa.binary())
    invalid = pa.StringArray.from_buffers(1, raw.buffers()[1], raw.buffers()[2])
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": invalid}), path)
    said = "cannot be read as Parquet: 'utf-8'" if column == "text" else "no column 'messages'"
    with pytest.raises(UserError, match=said) as error:
        read(path, "parquet", **{column: column})
    assert error.value.place == str(path)


def spec_of(source: str) -> RunSpec:
    """The example's run with another source."""
    checked = load(DOCUMENTS, f"data.sources={{reads: null, mine: {source}}}")
    return checked.require()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("odd.fa", b">a\nAC\n>b\nACXT\n", ""),
        ("odd.fastq", b"@a\nACXT\n+\nIIII\n", "'X' at column 3"),
        ("cut.txt.gz", gzip.compress(b"one\ntwo\n" * 9000, mtime=0)[:12], "damaged gzip"),
        ("ids.jsonl", b'{"ids": [1, "2"]}\n', "'ids' holds no list of token ids"),
    ],
)
def test_a_file_whose_first_document_cannot_be_read_is_named(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    # given one file
    (tmp_path / name).write_bytes(content)
    kind = {".fa": "fasta", ".fastq": "fastq", ".jsonl": "jsonl"}.get(Path(name).suffix, "text")
    # when the source is opened
    params = "{tokens: ids}" if name == "ids.jsonl" else "{}"
    source = f"{{kind: {kind}, uri: {tmp_path / name}, params: {params}}}"
    faults, notes = check_documents(spec_of(source))
    # then the fault has the source, the file and the reason; what comes later is not read
    if not said:
        assert (faults, len(notes)) == ([], 1)
        return
    (fault,) = faults
    assert fault.place == "data.sources.mine"
    assert name in fault.thing and said in fault.thing
    assert notes == []


def test_a_missing_file_and_generated_reads(tmp_path: Path) -> None:
    gone = spec_of("{kind: text, uri: https://example.org/a.txt}")
    assert [fault.place for fault in check_documents(gone)[0]] == ["data.sources.mine.uri"]
    faults, notes = check_documents(load(DOCUMENTS).require())
    assert (faults, notes) == ([], ["source reads: 4,000 generated reads of 100 bases"])
