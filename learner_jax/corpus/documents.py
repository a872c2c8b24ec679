"""Documents of text, JSON lines, Parquet, FASTA and FASTQ files, each plain or compressed by gzip.

The files are untrusted: every line and document has a size limit, and what a file holds that its
format does not allow is an error with the file and the line.
"""

from __future__ import annotations

import gzip
import json
import logging
import time
import zlib
from codecs import BOM_UTF8
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Literal, NamedTuple, TypeVar, cast

import pyarrow as pa

from runspec.core.errors import UserError
from runspec.core.parquet import open_parquet, parquet_rows

T = TypeVar("T")
Kind = Literal["text", "jsonl", "parquet", "fasta", "fastq"]
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


def _base_table() -> bytes:
    table = bytearray(256)
    for codes, bases in ((_BASES, _BASES), (b"U", b"T"), (_AMBIGUOUS, b"N" * len(_AMBIGUOUS))):
        for code, base in zip(codes, bases, strict=True):
            table[code] = table[ord(chr(code).lower())] = base
    return bytes(table)


_TO_BASE = _base_table()


Columns = tuple[int, str, Mapping[str, object]]
"""Number and place of a line or row, and its columns by name."""


class Document(NamedTuple):
    """A document of a file."""

    name: str
    """Name of a FASTA or FASTQ record; elsewhere the number of the line or row, from 1."""
    text: str


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
    by_file: Counter[str] = field(default_factory=Counter)
    """Documents of each file."""

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
    path: Path, counts: Counts, *, kind: Kind | None = None, column: str = "text"
) -> Iterator[Document]:
    """Yield the documents of a file, in order; sequences as bases A, C, G, T and N.

    Args:
        path: the file. A document of a text file is a line, of a FASTA or FASTQ file a record.
        counts: receives the numbers.
        kind: kind of the file; by default what its name says.
        column: field of a JSON line, or column of a Parquet file, that holds the text.

    Raises:
        UserError: the file cannot be read, is not of its kind, or holds no document.
    """
    documents = READERS[kind or kind_of(path)](path, counts, column)
    with readable(path, counts):
        for document in documents:
            if not document.text:
                counts.empty += 1
                continue
            counts.documents += 1
            counts.characters += len(document.text)
            counts.by_file[str(path)] += 1
            yield document
    require_some(path, counts)


def require_some(path: Path, counts: Counts) -> None:
    """Raise UserError where a file held no document."""
    if not counts.by_file[str(path)]:
        raise UserError("holds no document", place=str(path), remedy="leave the file out")


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


@contextmanager
def readable(path: Path, counts: Counts) -> Iterator[None]:
    """Raise what reading raises as an error that names the file."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(
            f"damaged gzip after document {counts.by_file[str(path)]}: {error}",
            place=str(path),
            remedy="copy the file again; `gzip -t` tests it",
        ) from error
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise UserError(
            f"not readable as Parquet: {error}", place=str(path), remedy="write the file again"
        ) from error
    except OSError as error:
        raise UserError(
            f"cannot read: {error.strerror or error}",
            place=str(path),
            remedy="name a file that exists and may be read",
        ) from error


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield number, from 1, and bytes of each line, without its end and without the byte order mark
    that editors put before the first."""
    with path.open("rb") as plain:
        zipped = plain.peek(2)[:2] == _GZIP_MAGIC
        with cast(BinaryIO, gzip.open(plain)) if zipped else plain as stream:
            number = 0
            while line := stream.readline(MAX_DOCUMENT_BYTES + 1):
                number += 1
                if len(line) > MAX_DOCUMENT_BYTES:
                    raise too_long(path, number)
                yield number, (line if number > 1 else line.removeprefix(BOM_UTF8)).rstrip(b"\r\n")


def too_long(path: Path, line: int) -> UserError:
    """Return the error of a document over the limit."""
    return UserError(
        f"a document of more than {MAX_DOCUMENT_BYTES >> 20} MiB",
        place=f"{path}:{line}",
        remedy="split it",
    )


def text_lines(path: Path, counts: Counts, column: str) -> Iterator[Document]:
    """Yield each line of a UTF-8 file."""
    for number, line in _lines(path):
        try:
            yield Document(str(number), line.decode())
        except UnicodeDecodeError as error:
            raise UserError(
                f"not UTF-8: byte {line[error.start]:#04x} at column {error.start + 1}",
                place=f"{path}:{number}",
                remedy="convert the file, for example with iconv",
            ) from error


def _jsonl(path: Path, counts: Counts, column: str) -> Iterator[Document]:
    for number, place, row in json_rows(path):
        yield Document(str(number), _string(row.get(column), column, place))


def json_rows(path: Path) -> Iterator[Columns]:
    """Yield the object of each JSON line; blank lines are left out."""
    for number, line in _lines(path):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line.decode())
            if not isinstance(row, dict):
                raise ValueError(f"it is of type {type(row).__name__}")
            if b"\\ud" in line.lower():  # may be half of a pair, which has no UTF-8
                json.dumps(row, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"not a JSON object: {error}", place=place, remedy="write one object a line"
            ) from error
        yield number, place, row


def _parquet(path: Path, counts: Counts, column: str) -> Iterator[Document]:
    for number, place, row in table_rows(path, column):
        yield Document(str(number), _string(row[column], column, place))


def table_rows(path: Path, column: str, *optional: str) -> Iterator[Columns]:
    """Yield a column of each row of a Parquet file, and the optional ones that the file has."""
    with open_parquet(path, {column, *optional}) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise UserError(
                f"has no column {column!r}, but {', '.join(names)}",
                place=str(path),
                remedy="name the column that holds the text",
            )
        columns = [name for name in dict.fromkeys((column, *optional)) if name in names]
        row = 0
        for rows in parquet_rows(file, columns, most=MAX_DOCUMENT_BYTES, place=str(path)):
            for found in rows:
                row += 1
                yield row, f"{path}, row {row}", found


def _string(value: object, column: str, place: str) -> str:
    if not isinstance(value, str):
        raise UserError(
            f"{column!r} holds {type(value).__name__}, not text",
            place=place,
            remedy="name the field that holds the text",
        )
    return value


def _fasta(path: Path, counts: Counts, column: str) -> Iterator[Document]:
    name: str | None = None
    parts: list[str] = []
    size = 0
    for number, line in _lines(path):
        if line.startswith(b">"):
            if name is not None:
                yield Document(name, "".join(parts))
            name, parts, size = _name(line), [], 0
        elif not line.strip():
            continue
        elif name is None:
            raise _malformed(path, number, "FASTA", "a record begins with a line of `>` and a name")
        else:
            size += len(line)
            if size > MAX_DOCUMENT_BYTES:
                raise too_long(path, number)
            parts.append(_bases(line, counts, path, number))
    if name is not None:
        yield Document(name, "".join(parts))


def _name(line: bytes) -> str:
    """Return the first word of a record's first line, without the mark."""
    return line[1:].decode(errors="replace").partition(" ")[0].partition("\t")[0]


def _fastq(path: Path, counts: Counts, column: str) -> Iterator[Document]:
    lines = _lines(path)
    for number, name in lines:
        if not name.strip():
            continue
        sequence, plus, quality = (next(lines, (0, b""))[1] for _ in range(3))
        if name[:1] != b"@" or plus[:1] != b"+" or len(quality) != len(sequence):
            expected = "a record has four lines: @name, bases, +, as many qualities as bases"
            raise _malformed(path, number, "FASTQ", expected)
        yield Document(_name(name), _bases(sequence, counts, path, number + 1))


def _bases(line: bytes, counts: Counts, path: Path, number: int) -> str:
    line = line.strip()
    bases = line.translate(_TO_BASE)
    if (at := bases.find(_FOREIGN)) >= 0:
        raise UserError(
            f"{chr(line[at])!r} at column {at + 1} is no code of a nucleotide",
            place=f"{path}:{number}",
            remedy="remove gaps and proteins; IUPAC codes of bases are read",
        )
    if bases != line:
        upper = line.upper()
        counts.lower_case += sum(map(line.count, _LOWER_CASE))
        counts.uracil += upper.count(b"U")
        counts.ambiguous += bases.count(b"N") - upper.count(b"N")
    return bases.decode()


def _malformed(path: Path, line: int, form: str, expected: str) -> UserError:
    return UserError(f"not {form}: {expected}", place=f"{path}:{line}", remedy="mend the record")


READERS: dict[Kind, Callable[[Path, Counts, str], Iterator[Document]]] = {
    "text": text_lines,
    "jsonl": _jsonl,
    "parquet": _parquet,
    "fasta": _fasta,
    "fastq": _fastq,
}
