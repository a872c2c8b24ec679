"""Documents of the spec's sources: text, token ids or conversations."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from learner_jax.corpus.documents import (
    MAX_DOCUMENT_BYTES,
    READERS,
    Counts,
    Kind,
    as_text,
    json_values,
    parquet_values,
    read_documents,
    readable,
    require_some,
    text_lines,
    too_long,
)
from runspec.core.errors import UserError
from runspec.core.spec.schema import Source

Messages = list[dict[str, Any]]


class Row(NamedTuple):
    """A document of a source."""

    place: str
    """File and line or row."""
    value: str | np.ndarray | Messages
    """Text, token ids int64 [n], or the messages of a conversation."""


def read_rows(
    source: Source, files: Sequence[Path], counts: Counts, *, conversations: bool
) -> Iterator[Row]:
    """Yield the documents of a source, all of one type.

    Args:
        source: of kind `text`, `jsonl`, `parquet`, `fasta` or `fastq`. Its `params` name the column
            of JSON lines or Parquet that holds the documents: `text`, `messages` or `tokens`.
        files: its files, in order.
        counts: receives the numbers.
        conversations: whether the column is one of messages where `params` names none.

    Raises:
        UserError: a file cannot be read, is not of its kind, or holds no document.
    """
    kind, named = _kind(source), {name for name in _CONVERT if name in source.params}
    if len(named) > 1:
        raise UserError(
            f"names {' and '.join(sorted(named))}",
            place=f"data.sources.{source.name}.params",
            remedy="name one column",
        )
    what = named.pop() if named else ("messages" if conversations else "text")
    column = str(source.params.get(what, what))
    if what == "text" or kind not in ("jsonl", "parquet"):
        if source.params.get("whole"):
            yield from _whole_files(files, counts)
            return
        for path in files:
            for document in read_documents(path, counts, kind=kind, column=column):
                yield Row(f"{path}:{document.name}", document.text)
        return
    values = json_values if kind == "jsonl" else parquet_values
    offset = int(source.params.get("id_offset", 0))
    for path in files:
        with readable(path, counts):
            for _, place, value in values(path, column):
                found = _CONVERT[what](value, column, place)
                if not len(found):
                    counts.empty += 1
                    continue
                counts.documents += 1
                counts.by_file[str(path)] += 1
                yield Row(place, found + offset if what == "tokens" else found)
        require_some(path, counts)


def _kind(source: Source) -> Kind:
    if source.kind not in READERS:
        raise UserError(
            f"{source.kind!r} is no kind of documents",
            place=f"data.sources.{source.name}.kind",
            remedy=f"name one of {', '.join(READERS)}",
        )
    return source.kind


def _whole_files(files: Sequence[Path], counts: Counts) -> Iterator[Row]:
    """Yield each text file as one document."""
    for path in files:
        with readable(path, counts):
            lines = [document.text for document in text_lines(path, counts, "")]
        text = "\n".join(lines)
        if len(text.encode()) > MAX_DOCUMENT_BYTES:
            raise too_long(path, len(lines))
        if text:
            counts.documents += 1
            counts.characters += len(text)
            counts.by_file[str(path)] += 1
            yield Row(str(path), text)
        require_some(path, counts)


def _token_ids(value: object, column: str, place: str) -> np.ndarray:
    if isinstance(value, list) and all(type(each) is int for each in value):
        return np.array(value, np.int64)
    raise UserError(
        f"{column!r} holds no list of token ids",
        place=place,
        remedy="name the field that holds them with params: {tokens: NAME}",
    )


def _messages(value: object, column: str, place: str) -> Messages:
    whole = isinstance(value, list) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) for each in value
    )
    if not whole:
        raise UserError(
            f"{column!r} holds no list of messages, each with a role",
            place=place,
            remedy="name the field that holds them with params: {messages: NAME}",
        )
    return cast(Messages, value)


_CONVERT: dict[str, Callable[[object, str, str], Any]] = {
    "text": as_text,
    "messages": _messages,
    "tokens": _token_ids,
}
"""How a value of a column is checked, by what the column holds."""
