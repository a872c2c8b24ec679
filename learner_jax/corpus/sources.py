"""Documents of the spec's sources: text, token ids or conversations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np

from learner_jax.corpus.conversations import TOOLS, conversation_of
from learner_jax.corpus.documents import Counts, Document, Kind, Parse, read_documents
from learner_jax.corpus.generated import GeneratedReads
from runspec.core.errors import UserError
from runspec.core.spec.documents import PARAMS, column_of, is_generated
from runspec.core.spec.schema import Source


def read_rows(
    source: Source, files: Sequence[Path], counts: Counts, algorithm: str
) -> Iterator[Document]:
    """Yield the documents of a source, all of one type: text, ids int64 [n], or conversations.

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
        for name, value in GeneratedReads.of(source.params).documents():
            counts.documents += 1
            counts.characters += len(value)
            yield Document(name, f"data.sources.{source.name}, read {name}", value)
        return
    if source.kind not in get_args(Kind):
        raise UserError(
            f"{source.kind!r} is no kind of documents",
            place=f"data.sources.{source.name}.kind",
            remedy=f"name one of {', '.join(PARAMS)}",
        )
    kind = cast(Kind, "whole" if source.params.get("whole") else source.kind)
    parse: Parse | None = None
    if what == "messages":
        parse = partial(conversation_of, column, filled=kind == "parquet")
    elif what == "tokens":
        parse = partial(_token_ids, column, int(str(source.params.get("id_offset", 0))))
    optional = (TOOLS,) if what == "messages" else ()
    for path in files:
        yield from read_documents(
            path, counts, kind=kind, column=column, parse=parse, optional=optional
        )


def _token_ids(column: str, offset: int, row: Mapping[str, Any], place: str) -> np.ndarray:
    value = row.get(column)
    try:
        found = np.array(value if isinstance(value, list) else None)
    except ValueError:  # lists of several lengths
        found = np.array(None)
    if found.ndim == 1 and (found.dtype.kind == "i" or not found.size):
        return found.astype(np.int64) + offset
    raise UserError(
        f"{column!r} holds no list of token ids",
        place=place,
        remedy="name the field that holds them with params: {tokens: NAME}",
    )
