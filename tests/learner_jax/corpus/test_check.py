"""`python -m learner_jax check`: what it says of sources that cannot be read."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from learner_jax.corpus.check import check_documents
from runspec.core.spec.schema import RunSpec
from tests.runspec.core.spec.spec_files import DOCUMENTS, load


def spec_of(source: str) -> RunSpec:
    """The example's run with another source."""
    checked = load(DOCUMENTS, f"data.sources={{reads: null, mine: {source}}}")
    return checked.require()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("empty.fa", b"", "holds no document"),
        ("odd.fa", b">a\nAC\n>b\nACXT\n", ""),
        ("odd.fastq", b"@a\nACXT\n+\nIIII\n", "'X' at column 3"),
        ("latin.txt", b"caf\xe9\n", "not UTF-8"),
        ("cut.txt.gz", gzip.compress(b"one\ntwo\n" * 9000, mtime=0)[:12], "damaged gzip"),
        ("other.jsonl", b'{"body": "one"}\n', "'text' holds NoneType"),
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
