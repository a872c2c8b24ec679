"""Documents of the spec's sources: text, token ids, conversations or generated reads.

`python -m learner_jax check` opens them before a role starts.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast, get_args

import numpy as np
import pyarrow as pa

from learner_jax.corpus import (
    MAX_DOCUMENT_BYTES,
    Counts,
    Document,
    Kind,
    Parse,
    is_gzip,
    read_documents,
    reported,
    require_unicode,
)
from runspec.core.errors import UserError
from runspec.core.rows import open_parquet, parquet_groups, readable, too_long
from runspec.core.schema import RunSpec, Source
from runspec.core.schema.load import load_resolved
from runspec.core.schema.source_files import PARAMS, column_of, is_generated, source_files
from runspec.core.tokenizer_files import ASSISTANT, ChatTemplate, Spans


def read_rows(
    source: Source, files: Sequence[Path], counts: Counts, algorithm: str
) -> Iterator[Document]:
    """Yield the documents of a source, all of one type: text, ids int64 [n], or conversations.

    Args:
        source: with files of documents, as the linter has checked it.
        files: its files, in order.
        counts: receives the numbers.
        algorithm: kind of the run's algorithm.

    Raises:
        UserError: a file cannot be read, is not of its kind, or holds no document.
    """
    what, column = column_of(source, algorithm)
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


def token_columns(
    source: Source, path: Path, algorithm: str
) -> Iterator[tuple[np.ndarray, np.ndarray]] | None:
    """Read token ids of a Parquet file column by column; None where `read_rows` has to.

    Returns:
        for some rows after others, int64 [tokens] and int64 [rows]: their ids and lengths. None
        where rows are no lists of integers, or the file is compressed by gzip.

    Raises:
        UserError: it is not Parquet, or a row is null or too long; then while it is read.
    """
    what, column = column_of(source, algorithm)
    if what != "tokens" or source.kind != "parquet":
        return None
    with readable(str(path), "Parquet"), path.open("rb") as file:
        if is_gzip(file):
            return None
        schema = open_parquet(file, {column}).schema_arrow
    kind = schema.field(column).type if column in schema.names else pa.null()
    if not pa.types.is_list(kind) or not pa.types.is_integer(kind.value_type):
        return None
    return _columns(path, column, int(str(source.params.get("id_offset", 0))))


def _columns(path: Path, column: str, offset: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    with readable(str(path), "Parquet"):
        for number, table in parquet_groups(path, [column], str(path)):
            for chunk in table.column(column).chunks:
                ids = chunk.flatten()
                if chunk.null_count or ids.null_count:
                    raise _no_ids(column, f"{path}, row group {number}")
                lengths = chunk.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
                if lengths.max(initial=0) * ids.type.bit_width // 8 > MAX_DOCUMENT_BYTES:
                    raise too_long(f"{path}, row group {number}", MAX_DOCUMENT_BYTES)
                yield ids.to_numpy().astype(np.int64) + offset, lengths


def _token_ids(column: str, offset: int, row: Mapping[str, Any], place: str) -> np.ndarray:
    value = row.get(column)
    try:
        found = np.array(value if isinstance(value, list) else None)
    except ValueError:  # lists of several lengths
        found = np.array(None)
    if found.ndim == 1 and (found.dtype.kind == "i" or not found.size):
        return found.astype(np.int64) + offset
    raise _no_ids(column, place)


def _no_ids(column: str, place: str) -> UserError:
    return UserError(
        f"{column!r} holds no list of token ids",
        place=place,
        remedy="name the field that holds them with params: {tokens: NAME}",
    )


Message = dict[str, Any]
TOOLS = "tools"
"""Column with the tools of a conversation."""
_SAID = ("one-two", "three-four")
"""Texts of the parts that a template is tried on."""
_UNREAD = "five-six"
"""Field of these parts. Templates do not read it; only those that print a whole part show it."""


@dataclass(frozen=True)
class Conversation:
    """Messages, and the schemas of the tools that the assistant may call."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None

    def __len__(self) -> int:
        return len(self.messages)


def conversation_of(
    column: str, row: Mapping[str, Any], place: str, *, filled: bool
) -> Conversation:
    """Return the conversation of a row.

    Args:
        column: column of the messages.
        row: columns by name; `tools` is optional.
        place: file and line or row, for messages.
        filled: whether null stands for fields that only other rows have, as in Parquet.

    Raises:
        UserError: there are no messages, or a message or the tools cannot be rendered as text.
    """

    def refuse(what: str, remedy: str) -> NoReturn:
        raise UserError(what, place=place, remedy=remedy)

    value, tools = row.get(column), row.get(TOOLS)
    if not isinstance(value, list) or not all(
        isinstance(each, dict) and isinstance(each.get("role"), str) for each in value
    ):
        remedy = "name the field that holds them with params: {messages: NAME}"
        refuse(f"{column!r} holds no list of messages, each with a role", remedy)
    # Templates ask which fields a message has, so a field that is null is left out.
    messages = [
        {
            key: _without_nulls(said) if filled else said
            for key, said in each.items()
            if said is not None or key == "content"
        }
        for each in value
    ]
    for number, message in enumerate(messages, start=1):
        if fault := _fault(message):
            what = f"message {number} of {column!r}, of role {message['role'][:40]!r}, {fault}"
            refuse(what, "give it text as content, or remove the conversation")
    require_unicode(messages, place)
    try:
        return Conversation(messages, _tools(_without_nulls(tools) if filled else tools))
    except (ValueError, RecursionError) as error:
        what = f"{TOOLS!r} holds no list of objects, or JSON text of one: {error}"
        refuse(what, "write the tools as the chat template reads them, or rename the column")


def _without_nulls(value: Any) -> Any:
    """Remove null fields of objects at every depth; null elements of lists stay."""
    if isinstance(value, dict):
        return {key: _without_nulls(said) for key, said in value.items() if said is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _fault(message: Message) -> str:
    """Return what is wrong with the content of a message; empty if nothing is."""
    content = message.get("content")
    if content is None:
        calls = message["role"] == ASSISTANT and message.get("tool_calls")
        return "" if calls else "has neither content nor tool_calls"
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            return f"has a part of type {kind!r:.40}, not text"
        if not isinstance(part.get("text"), str):
            return "has a part of type 'text' without a text"
    if isinstance(content, (str, list)):
        return ""
    return f"has content of type {type(content).__name__}, not text"


def _tools(value: Any) -> list[dict[str, Any]] | None:
    """Return the tools of a row; an empty text or list is none.

    Raises:
        ValueError: they are no list of objects, or JSON text of one.
    """
    if isinstance(value, str):
        value = json.loads(value) if value.strip() else None
        json.dumps(value, ensure_ascii=False).encode()  # half a pair has no UTF-8
    if value is not None and not isinstance(value, list):
        raise ValueError(f"it is of type {type(value).__name__}")
    for each in value or ():
        if not isinstance(each, dict):
            raise ValueError(f"an element is of type {type(each).__name__}")
    return value or None


def spans_of(template: ChatTemplate, conversation: Conversation) -> Spans:
    """Render a conversation; see `ChatTemplate.spans`.

    Content goes to the template as text or as a list of parts, whichever it renders. A null content
    beside tool calls is an empty text for a template that would write "None".

    Raises:
        UserError: see `ChatTemplate.spans`.
    """
    messages = [_fitting(template, message) for message in conversation.messages]
    text, spans = template.spans(messages, conversation.tools)
    if "None" in text and any(each.get("content") is None for each in messages):
        blank = [{**each, "content": each.get("content") or ""} for each in messages]
        of_blank = template.spans(blank, conversation.tools)
        if of_blank[0].count("None") < text.count("None"):
            return of_blank
    return text, spans


def _fitting(template: ChatTemplate, message: Message) -> Message:
    """Return a message whose content has a form that the template renders."""
    role, content = message["role"], message.get("content")
    if isinstance(content, list) and not renders(template, role, parts=True):
        return {**message, "content": "".join(part["text"] for part in content)}
    if isinstance(content, str) and only_parts(template, role):
        return {**message, "content": [{"type": "text", "text": content}]}
    return message


def only_parts(template: ChatTemplate, role: str) -> bool:
    """Return whether a template renders a role's content as a list of parts, but not as text."""
    return not renders(template, role, parts=False) and renders(template, role, parts=True)


@lru_cache(256)
def renders(template: ChatTemplate, role: str, *, parts: bool) -> bool:
    """Return whether a template renders a role's content that is text, or a list of parts.

    A conversation with such a message is rendered.
    """
    listed = [{"type": "text", "text": said, _UNREAD: _UNREAD} for said in _SAID]
    tried: Any = {"role": role, "content": listed if parts else "".join(_SAID)}
    user, assistant = ({"role": role, "content": "x"} for role in ("user", ASSISTANT))
    talks: Any = {"system": [tried, user], "user": [tried], ASSISTANT: [user, tried]}
    try:
        text = template.render(talks.get(role, [user, assistant, tried]))
    except UserError:
        return False
    return all(said in text for said in _SAID) and _UNREAD not in text


ORDER = 3
BASES = np.frombuffer(b"ACGT", np.uint8)
CONCENTRATION = 0.5
"""Of the Dirichlet distribution. Over many organisms a base has 1.25 bits of entropy given the
three before it, and 0.48 more given two."""
_BLOCK = 1 << 12
"""Reads made at a time."""


class Read(NamedTuple):
    """A read of an organism."""

    name: str
    """`ORGANISM-NUMBER`."""
    text: str
    """Its bases."""


@dataclass(frozen=True)
class GeneratedReads:
    """Parameters of a source of kind `generated_reads`."""

    organisms: int = 8
    reads: int = 20_000
    length: int = 100
    """Bases of a read."""
    seed: int = 0

    @classmethod
    def of(cls, params: Mapping[str, object]) -> GeneratedReads:
        """Return what a source's `params` say, which the linter has checked."""
        return cls(**{key: int(str(value)) for key, value in params.items()})

    @property
    def blocks(self) -> range:
        """Numbers of the first read of each block; the blocks are made alone."""
        return range(0, self.reads, _BLOCK)

    def tables(self) -> np.ndarray:
        """Return p(base | three bases before it) of each organism: float64 [organisms, 64, 4].

        The first of the three bases counts 16, the second 4, the third 1.
        """
        rng = np.random.default_rng(self.seed)
        return rng.dirichlet(np.full(len(BASES), CONCENTRATION), (self.organisms, 4**ORDER))

    def documents(self) -> Iterator[Read]:
        """Yield the reads, in order."""
        return chain.from_iterable(map(self.block, self.blocks))

    def block(self, first: int) -> Iterator[Read]:
        """Yield the reads of a block, in order; the first three bases are uniform."""
        # A generator of its own for each block: a read does not depend on how many there are.
        rng, bounds = np.random.default_rng((self.seed, first)), _bounds(self)
        organisms = rng.integers(self.organisms, size=_BLOCK)
        bases = rng.integers(len(BASES), size=(max(self.length, ORDER), _BLOCK))
        draws = rng.random(bases.shape)
        for at in range(ORDER, self.length):
            context = 16 * bases[at - 3] + 4 * bases[at - 2] + bases[at - 1]
            bases[at] = (draws[at, :, None] > bounds[organisms, context]).sum(axis=-1)
        texts = BASES[bases[: self.length].T]
        for i in range(min(_BLOCK, self.reads - first)):
            yield Read(f"{organisms[i]}-{first + i}", texts[i].tobytes().decode())


@lru_cache(1)
def _bounds(reads: GeneratedReads) -> np.ndarray:
    """Return the sums of an organism's first probabilities: float64 [organisms, 64, 3]."""
    return reads.tables().cumsum(axis=-1)[..., :-1]


MAX_FAULTS = 20
MAX_CHARS = 1000
_log = logging.getLogger(__name__)
"""`runspec.local.planning` shows the lines of this log as progress."""


def check_documents(spec: RunSpec) -> tuple[list[UserError], list[str]]:
    """Read the first document of every file of a run's sources.

    Returns:
        What the run lacks, `place` a path of the spec; and a line for each source.
    """
    faults, notes = list[UserError](), list[str]()
    for source in spec.data.sources:
        place = f"data.sources.{source.name}"
        _log.info("source %s", source.name)
        try:
            notes.append(f"source {source.name}: {_open(source, spec.algorithm.kind)}")
        except UserError as error:
            inside = error.place.startswith("data.") or not error.place
            thing = error.thing if inside else f"{error.place}: {error.thing}"
            where = error.place if error.place.startswith("data.") else place
            faults.append(UserError(thing[:MAX_CHARS], place=where, remedy=error.remedy))
    return faults[:MAX_FAULTS], notes


def _open(source: Source, kind: str) -> str:
    """Open a source; return what it holds in words.

    Raises:
        UserError: a file is missing or cannot be read.
    """
    if is_generated(source):
        reads = GeneratedReads.of(source.params)
        next(reads.documents())
        return f"{reads.reads:,} generated reads of {reads.length} bases"
    files = source_files(source)
    counts = Counts()
    for path in reported(files.values(), counts, _log):
        next(read_rows(source, [path], counts, kind))
    size = sum(path.stat().st_size for path in files.values())
    return f"{len(files)} file{'s' if len(files) > 1 else ''}, {size:,} bytes"


def check_command(folder: Path) -> None:
    """Print what was found as a JSON object: `faults`, each `place`, `thing`, `remedy`; `notes`."""
    faults, notes = check_documents(load_resolved(folder))
    found = [{"place": f.place, "thing": f.thing, "remedy": f.remedy} for f in faults]
    json.dump({"faults": found, "notes": notes}, sys.stdout)
