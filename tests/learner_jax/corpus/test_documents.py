"""Documents of text, JSON lines, Parquet, FASTA and FASTQ, and what is wrong with some files."""

from __future__ import annotations

import gzip
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from learner_jax.corpus import documents
from learner_jax.corpus.documents import Counts, kind_of, read_documents
from runspec.core.errors import UserError


def read(path: Path, counts: Counts | None = None, column: str = "text") -> list[str]:
    return [document.text for document in read_documents(path, counts or Counts(), column=column)]


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
    assert read(write(tmp_path / (name + suffix), data)) == expected


def test_a_document_has_the_name_of_its_record_or_its_line(tmp_path: Path) -> None:
    fasta = write(tmp_path / "a.fa", b">one of them\nACGT\n>two\tx\nA\n")
    text = write(tmp_path / "a.txt", b"one\n\nthree\n")
    names = [[d.name for d in read_documents(path, Counts())] for path in (fasta, text)]
    assert names == [["one", "two"], ["1", "3"]]


def test_parquet_gives_the_named_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": [1, 2], "body": ["one", "two"]}), path)
    assert read(path, column="body") == ["one", "two"]


def test_a_name_says_its_kind() -> None:
    names = ["a.fna.gz", "a.FQ", "a.jsonl.gz", "a.parquet", "a.txt", "a"]
    kinds = ["fasta", "fastq", "jsonl", "parquet", "text", "text"]
    assert [kind_of(Path(name)) for name in names] == kinds


def test_bases_are_normalised_and_what_was_changed_is_counted(tmp_path: Path) -> None:
    # given lower case, RNA and ambiguous codes, and a record without bases
    path = write(tmp_path / "a.fa", b">one\nacGU\nRyN\n>empty\n>two\nAC\n")
    counts = Counts()
    # when it is read
    found = read(path, counts)
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
        ("a.txt", b"", "a.txt: holds no document"),
        ("a.txt", b"\n\n", "a.txt: holds no document"),
        ("a.txt", b"fine\nbad \xff\n", "a.txt:2: not UTF-8: byte 0xff at column 5"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', "a.jsonl:2: not a JSON object"),
        ("a.jsonl", b'{"text": 3}\n', "a.jsonl:1: 'text' holds int, not text"),
        ("a.jsonl", b'{"body": "x"}\n', "a.jsonl:1: 'text' holds NoneType"),
        ("a.parquet", b"no such thing", "a.parquet: not readable as Parquet"),
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
        read(write(tmp_path / name, data))
    assert f"{tmp_path}/{message}" in str(caught.value)
    assert "remedy: " in str(caught.value)


def test_a_gzip_that_is_cut_off_is_named_after_its_last_document(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"one\n" * 100_000)[:-20])
    with pytest.raises(UserError, match=r"a\.txt\.gz: damaged gzip after document \d+"):
        read(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.txt: cannot read: No such file"):
        read(tmp_path / "none.txt")


@pytest.mark.parametrize(
    ("name", "data"), [("a.txt", b"x" * 33), ("a.fa", b">a\n" + b"ACG\n" * 11)]
)
def test_a_document_over_the_limit_is_refused_before_it_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes
) -> None:
    monkeypatch.setattr(documents, "MAX_DOCUMENT_BYTES", 32)
    with pytest.raises(UserError, match="a document of more than"):
        read(write(tmp_path / name, data))
