"""Corpora of documents: files of text or of nucleotide sequences, and tokenizers made from them.

Here documents are read, from text, JSON lines, Parquet, FASTA and FASTQ files, each plain or
compressed by gzip. The files are untrusted: every line and document has a size limit, and what a
file holds that its format does not allow is an error with the file and the line.
"""

from __future__ import annotations

import gzip
import json
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar, cast

from runspec.core.errors import UserError
from runspec.core.rows import json_rows, lines, parquet_groups, readable, table_rows, too_long

T = TypeVar("T")
Kind = Literal["text", "whole", "jsonl", "parquet", "fasta", "fastq"]
"""Kind of a file; `whole` is a text file that is one document."""
MAX_DOCUMENT_BYTES = 1 << 28
"""Largest document, and longest line of a file."""
_SUFFIXES: dict[str, Kind] = {
    **dict.fromkeys((".fa", ".fasta", ".fna", ".ffn"), "fasta"),
    **dict.fromkeys((".fq", ".fastq"), "fastq"),
    **dict.fromkeys((".jsonl", ".ndjson"), "jsonl"),
    ".parquet": "parquet",
}
_REPORT_EVERY_S = 10.0
_GZIP_MAGIC = b"\x1f\x8b"

# IUPAC codes: https://doi.org/10.1093/nar/13.9.3021
_BASES, _AMBIGUOUS = b"ACGTN", b"RYSWKMBDHV"
_LOWER_CASE = [bytes([code]) for code in (_BASES + b"U" + _AMBIGUOUS).lower()]
_FOREIGN = 0
"""Stands for a character that is no base, in `_TO_BASE`."""


_TO_BASE = bytearray(256)
_READ_AS = _BASES + b"T" + b"N" * len(_AMBIGUOUS)
for _code, _base in zip(_BASES + b"U" + _AMBIGUOUS, _READ_AS, strict=True):
    _TO_BASE[_code] = _TO_BASE[ord(chr(_code).lower())] = _base


class Document(NamedTuple):
    """A document of a file."""

    name: str
    """Name of a FASTA or FASTQ record; elsewhere the number of the line or row, from 1."""
    place: str
    """File and line or row."""
    value: Any
    """Text; or what `parse` of `read_documents` makes of a row."""


Parse = Callable[[Mapping[str, Any], str], Any]
"""Makes a document of a row's columns; its second argument is the row's place."""


@dataclass
class Counts:
    """Numbers of documents read, and of changes made to them."""

    documents: int = 0
    characters: int = 0
    empty: int = 0
    """Documents without a character; they are left out."""
    lower_case: int = 0
    """Bases in lower case, which are raised."""
    uracil: int = 0
    """Bases U, which become T."""
    ambiguous: int = 0
    """Bases of other IUPAC codes, which become N."""
    too_short: int = 0
    """Documents of one token, which nothing predicts; a corpus leaves them out."""
    too_long: int = 0
    """Conversations longer than a row; they are left out."""
    without_assistant: int = 0
    """Conversations in which the assistant says nothing; they are left out."""

    def add(self, others: Counts) -> None:
        """Add the numbers of other documents."""
        for name, number in asdict(others).items():
            setattr(self, name, getattr(self, name) + number)

    def __str__(self) -> str:
        changes = {
            "empty ones left out": self.empty,
            "bases raised from lower case": self.lower_case,
            "U read as T": self.uracil,
            "ambiguous bases read as N": self.ambiguous,
            "of one token left out": self.too_short,
            "conversations longer than a row left out": self.too_long,
            "conversations without the assistant left out": self.without_assistant,
        }
        said = [f"{count:,} {what}" for what, count in changes.items() if count]
        return ", ".join([f"{self.documents:,} documents of {self.characters:,} characters", *said])


def kind_of(path: Path) -> Kind:
    """Return the kind that a file's name says; `text` unless it says another."""
    name = Path(path.stem) if path.suffix == ".gz" else path
    return _SUFFIXES.get(name.suffix.lower(), "text")


def read_documents(
    path: Path,
    counts: Counts,
    *,
    kind: Kind | None = None,
    column: str = "text",
    parse: Parse | None = None,
    optional: Sequence[str] = (),
) -> Iterator[Document]:
    """Yield the documents of a file that are not empty, in order; sequences as bases ACGTN.

    Args:
        path: the file. A document of a text file is a line, of a FASTA or FASTQ file a record.
        counts: receives the numbers.
        kind: kind of the file; by default what its name says.
        column: field of a JSON line, or column of a Parquet file, that holds the text.
        parse: makes documents of rows in place of the column's text.
        optional: columns that it reads where the file has them.

    Raises:
        UserError: the file cannot be read, is not of its kind, or holds no document.
    """
    before, place = counts.documents, str(path)
    kind = kind or kind_of(path)
    with (
        readable(place, "Parquet" if kind == "parquet" else "text"),
        path.open("rb") as plain,
        cast(BinaryIO, gzip.open(plain)) if is_gzip(plain) else plain as stream,
    ):
        if kind in ("jsonl", "parquet"):
            found = _rows(stream, place, kind, column, parse or partial(_text, column), optional)
        elif kind in ("text", "whole"):
            found = (_text_lines if kind == "text" else _whole)(stream, place)
        else:
            found = (_fasta if kind == "fasta" else _fastq)(stream, place, counts)
        for document in found:
            if not len(document.value):
                counts.empty += 1
                continue
            counts.documents += 1
            if isinstance(document.value, str):
                counts.characters += len(document.value)
            yield document
    if counts.documents == before:
        raise no_document(place)


def is_gzip(file: BinaryIO) -> bool:
    """Whether a file that was just opened is compressed by gzip; it stays at its beginning."""
    magic = file.read(2)
    file.seek(0)
    return magic == _GZIP_MAGIC


def no_document(place: str) -> UserError:
    """Return the error of a file without a document."""
    return UserError("holds no document", place=place, remedy="leave the file out")


def read_all(
    files: Iterable[Path], counts: Counts, *, kind: Kind | None, column: str
) -> Iterator[Document]:
    """Yield the documents of several files, in order; see `read_documents`."""
    for path in files:
        yield from read_documents(path, counts, kind=kind, column=column)


def reported(items: Iterable[T], counts: Counts, log: logging.Logger) -> Iterator[T]:
    """Yield the items, and log the counts every few seconds and at the end."""
    logged_at = time.monotonic()
    for item in items:
        yield item
        if time.monotonic() - logged_at > _REPORT_EVERY_S:
            logged_at = time.monotonic()
            log.info("read %s", counts)
    log.info("read %s", counts)


def _text_lines(stream: BinaryIO, place: str) -> Iterator[Document]:
    """Yield each line of a UTF-8 file."""
    for number, _, line in lines(stream, place, MAX_DOCUMENT_BYTES):
        try:
            yield Document(str(number), f"{place}:{number}", line.decode())
        except UnicodeDecodeError as error:
            raise UserError(
                f"not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}",
                place=f"{place}:{number}",
                remedy="convert the file, for example with iconv",
            ) from error


def _whole(stream: BinaryIO, place: str) -> Iterator[Document]:
    """Yield a text file as one document, its lines joined by line feeds."""
    found, size = list[str](), 0
    for line in _text_lines(stream, place):
        found.append(line.value)
        size += len(line.value) + 1
        if size > MAX_DOCUMENT_BYTES:
            raise too_long(line.place, MAX_DOCUMENT_BYTES)
    yield Document(place, place, "\n".join(found))


def _rows(
    stream: BinaryIO, place: str, kind: str, column: str, parse: Parse, optional: Sequence[str]
) -> Iterator[Document]:
    if kind == "jsonl":
        rows = json_rows(stream, place, MAX_DOCUMENT_BYTES)
    else:
        groups = parquet_groups(stream, [column], place, optional=optional)
        rows = table_rows(groups, place, MAX_DOCUMENT_BYTES)
    for row in rows:
        yield Document(str(row.number), row.place, parse(row.columns, row.place))


def _text(column: str, row: Mapping[str, Any], place: str) -> str:
    value = row.get(column)
    if not isinstance(value, str):
        raise UserError(
            f"{column!r} holds {type(value).__name__}, not text",
            place=place,
            remedy="name the field that holds the text",
        )
    require_unicode(value, place)
    return value


def require_unicode(value: object, place: str) -> None:
    """Raise UserError where a text, or a text in JSON data, holds half of a surrogate pair."""
    try:
        (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"not Unicode: {error.reason}", place=place, remedy="mend the text, or leave it out"
        ) from error


def _fasta(stream: BinaryIO, place: str, counts: Counts) -> Iterator[Document]:
    name: str | None = None
    parts: list[str] = []
    size = 0
    begun = ""
    for number, _, line in lines(stream, place, MAX_DOCUMENT_BYTES):
        if line.startswith(b">"):
            if name is not None:
                yield Document(name, begun, "".join(parts))
            name, parts, size, begun = _name(line), [], 0, f"{place}:{number}"
        elif not line.strip():
            continue
        elif name is None:
            expected = "a record begins with a line of `>` and a name"
            raise _malformed(f"{place}:{number}", "FASTA", expected)
        else:
            size += len(line)
            if size > MAX_DOCUMENT_BYTES:
                raise too_long(f"{place}:{number}", MAX_DOCUMENT_BYTES)
            parts.append(_bases(line, counts, f"{place}:{number}"))
    if name is not None:
        yield Document(name, begun, "".join(parts))


def _name(line: bytes) -> str:
    """Return the first word of a record's first line, without the mark."""
    return line[1:].decode(errors="replace").partition(" ")[0].partition("\t")[0]


def _fastq(stream: BinaryIO, place: str, counts: Counts) -> Iterator[Document]:
    left = lines(stream, place, MAX_DOCUMENT_BYTES)
    for number, _, name in left:
        if not name.strip():
            continue
        sequence, plus, quality = (next(left, (0, 0, b""))[2] for _ in range(3))
        if name[:1] != b"@" or plus[:1] != b"+" or len(quality) != len(sequence):
            expected = "a record has four lines: @name, bases, +, as many qualities as bases"
            raise _malformed(f"{place}:{number}", "FASTQ", expected)
        bases = _bases(sequence, counts, f"{place}:{number + 1}")
        yield Document(_name(name), f"{place}:{number}", bases)


def _bases(line: bytes, counts: Counts, place: str) -> str:
    line = line.strip()
    bases = line.translate(_TO_BASE)
    if (at := bases.find(_FOREIGN)) >= 0:
        raise UserError(
            f"{chr(line[at])!r} at column {at + 1} is no code of a nucleotide",
            place=place,
            remedy="remove gaps and proteins; IUPAC codes of bases are read",
        )
    if bases != line:
        upper = line.upper()
        counts.lower_case += sum(map(line.count, _LOWER_CASE))
        counts.uracil += upper.count(b"U")
        counts.ambiguous += bases.count(b"N") - upper.count(b"N")
    return bases.decode()


def _malformed(place: str, form: str, expected: str) -> UserError:
    return UserError(f"not {form}: {expected}", place=place, remedy="mend the record")
