"""Documents of the spec's sources: text, token ids or conversations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from learner_jax.corpus.conversations import TOOLS, Conversation, conversation_of
from learner_jax.corpus.documents import (
    MAX_DOCUMENT_BYTES,
    READERS,
    Counts,
    Kind,
    json_rows,
    read_documents,
    readable,
    require_some,
    table_rows,
    text_lines,
    too_long,
)
from learner_jax.corpus.generated import GeneratedReads
from runspec.core.errors import UserError
from runspec.core.spec.schema import Source
from runspec.core.spec.source_files import PARAMS, column_of, is_generated


class Row(NamedTuple):
    """A document of a source."""

    place: str
    """File and line or row."""
    value: str | np.ndarray | Conversation
    """Text, token ids int64 [n], or a conversation."""

    @property
    def size(self) -> int:
        """Characters or ids, about."""
        if isinstance(self.value, Conversation):
            parts = [message.get("content") for message in self.value.messages]
            return sum(len(str(part)) for part in (*parts, self.value.tools or ""))
        return len(self.value)


def read_rows(
    source: Source, files: Sequence[Path], counts: Counts, algorithm: str
) -> Iterator[Row]:
    """Yield the documents of a source, all of one type.

    Args:
        source: of documents, as the linter has checked it.
        files: its files, in order.
        counts: receives the numbers.
        algorithm: kind of the run's algorithm.

    Raises:
        UserError: a file cannot be read, is not of its kind, or holds no document.
    """
    what, column = column_of(source, algorithm)
    if is_generated(source):
        for document in GeneratedReads.of(source.params).documents():
            counts.documents += 1
            counts.characters += len(document.text)
            yield Row(f"data.sources.{source.name}, read {document.name}", document.text)
    elif source.params.get("whole"):
        yield from _whole_files(files, counts)
    elif what == "text":
        for path in files:
            for document in read_documents(path, counts, kind=_kind(source), column=column):
                yield Row(f"{path}:{document.name}", document.text)
    else:
        table = source.kind == "parquet"
        optional = (TOOLS,) if what == "messages" else ()
        offset = int(str(source.params.get("id_offset", 0)))
        found: Conversation | np.ndarray
        for path in files:
            with readable(path, counts):
                rows = table_rows(path, column, *optional) if table else json_rows(path)
                for _, place, row in rows:
                    if what == "messages":
                        found = conversation_of(row, column, place, filled=table)
                    else:
                        found = _token_ids(row.get(column), column, place) + offset
                    if not len(found):
                        counts.empty += 1
                        continue
                    counts.documents += 1
                    counts.by_file[str(path)] += 1
                    yield Row(place, found)
            require_some(path, counts)


def _kind(source: Source) -> Kind:
    if source.kind not in READERS:
        raise UserError(
            f"{source.kind!r} is no kind of documents",
            place=f"data.sources.{source.name}.kind",
            remedy=f"name one of {', '.join(PARAMS)}",
        )
    return source.kind


def _whole_files(files: Sequence[Path], counts: Counts) -> Iterator[Row]:
    """Yield each text file as one document, its lines joined by line feeds."""
    for path in files:
        lines, size = list[str](), 0
        with readable(path, counts):
            for document in text_lines(path, counts, ""):
                lines.append(document.text)
                size += len(document.text) + 1
                if size > MAX_DOCUMENT_BYTES:
                    raise too_long(path, len(lines))
        text = "\n".join(lines)
        if text:
            counts.documents += 1
            counts.characters += len(text)
            counts.by_file[str(path)] += 1
            yield Row(str(path), text)
        require_some(path, counts)


def _token_ids(value: object, column: str, place: str) -> np.ndarray:
    try:
        found = np.array(value if isinstance(value, list) else None)
    except ValueError:  # lists of several lengths
        found = np.array(None)
    if found.ndim == 1 and (found.dtype.kind == "i" or not found.size):
        return found.astype(np.int64)
    raise UserError(
        f"{column!r} holds no list of token ids",
        place=place,
        remedy="name the field that holds them with params: {tokens: NAME}",
    )
