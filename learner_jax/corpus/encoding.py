"""Documents of a source as tokens: plain text, token ids, or conversations with a mask."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from tokenizers import Tokenizer

from learner_jax.corpus import Counts, Document, no_document
from learner_jax.corpus.sources import (
    Conversation,
    GeneratedReads,
    only_parts,
    read_rows,
    spans_of,
    token_columns,
)
from runspec.core.canonical import canonical_json, digest_bytes
from runspec.core.errors import UserError
from runspec.core.schema import SUPERVISED, RunSpec, Source
from runspec.core.schema.source_files import is_generated
from runspec.core.tokenizer_files import ASSISTANT, ChatTemplate, TokenizerFiles

PRETRAIN, SFT = SUPERVISED
_BATCH, _BATCH_SIZE = 512, 1 << 22
"""Documents that are tokenized together, and characters or ids after which there are no more."""


class Encoded(NamedTuple):
    """Documents of at least two tokens each, one after the other."""

    tokens: np.ndarray
    """[tokens], of the encoder's `dtype`."""
    mask: np.ndarray
    """bool [tokens]: whether the token is trained; the first of a document never is."""
    lengths: np.ndarray
    """int64 [documents]: tokens."""
    trained: np.ndarray
    """int64 [documents]: trained tokens."""
    text_bytes: np.ndarray
    """int64 [documents]: bytes in UTF-8 of the text that the trained tokens stand for."""


class Tokenized(NamedTuple):
    """A document."""

    place: str
    """File and line or row."""
    ids: np.ndarray
    """int64 [n]."""
    mask: np.ndarray | None
    """bool [n]: whether the token is what the assistant says; None where there is no assistant."""


class Reads(NamedTuple):
    """A block of generated reads, which are made where they are encoded."""

    source: str
    """Name of the source."""
    reads: GeneratedReads
    first: int
    """One of `reads.blocks`."""

    def documents(self, counts: Counts) -> list[Document]:
        """Make the reads, and count them."""
        place = f"data.sources.{self.source}, read"
        made = [Document(n, f"{place} {n}", text) for n, text in self.reads.block(self.first)]
        counts.documents += len(made)
        counts.characters += len(made) * self.reads.length
        return made


Piece = Sequence[Document] | Reads
"""Documents of one source that are encoded together."""
EncodeAll = Callable[[Iterable[Piece]], Iterator[tuple[Encoded | None, Counts]]]
"""Encodes pieces, in their order."""


@dataclass(frozen=True)
class Encoder:
    """Makes tokens of documents.

    Text gets the special tokens of the tokenizer's own template, or, where that adds none, the end
    token.
    """

    files: TokenizerFiles
    template: ChatTemplate | None
    masked: bool
    """Whether documents have masks: those of `sft`."""
    vocabulary: int
    """Rows of the model's embedding."""
    longest: int | None
    """Tokens of the longest conversation that is kept; None: documents are cut."""
    text_bytes: np.ndarray
    """int64 [vocabulary]: see `token_bytes`."""
    end: int | None
    """Id of the end token."""

    @classmethod
    def of(cls, spec: RunSpec, model_dir: Path, vocabulary: int) -> Encoder:
        """Read the tokenizer of a run.

        Raises:
            UserError: a file is missing or malformed.
        """
        files = TokenizerFiles.read(model_dir)
        masked = spec.algorithm.kind == SFT
        longest = spec.learner.packing.tokens if masked else None
        template = ChatTemplate.of(files) if masked else None
        text_bytes, end = token_bytes(files.tokenizer, vocabulary), files.special_id("eos_token")
        return cls(files, template, masked, vocabulary, longest, text_bytes, end)

    @property
    def digest(self) -> str:
        """Names all that tokens follow from besides the documents."""
        origins = {
            "tokenizer": digest_bytes(self.files.tokenizer.to_str().encode()),
            "special": self.files.special_tokens,
            "template": None if self.template is None else self.template.source,
            "masked": self.masked,
            "longest": self.longest,
            "vocabulary": self.vocabulary,
        }
        return digest_bytes(canonical_json(origins))

    @property
    def dtype(self) -> str:
        """Type of the stored tokens."""
        return "<u2" if self.vocabulary <= 1 << 16 else "<u4"

    def encoded(
        self, source: Source, files: Sequence[Path], counts: Counts, encode_all: EncodeAll
    ) -> Iterator[Encoded]:
        """Yield the documents of a source, in the order of its files, some at a time.

        Args:
            source: of the spec.
            files: its files, in order.
            counts: receives the numbers.
            encode_all: `map` of `encode`.

        Raises:
            UserError: a document cannot be read, or has a token that the model lacks.
        """
        algorithm = SFT if self.masked else PRETRAIN
        if is_generated(source):
            reads = GeneratedReads.of(source.params)
            yield from _taken(
                encode_all(Reads(source.name, reads, i) for i in reads.blocks), counts
            )
        for path in files:
            if (columns := token_columns(source, path, algorithm)) is not None:
                yield from self._ids(columns, str(path), counts)
            else:
                rows = read_rows(source, [path], counts, algorithm)
                yield from _taken(encode_all(_batches(rows)), counts)

    def encode(self, piece: Piece) -> tuple[Encoded | None, Counts]:
        """Return the documents of a piece that can be trained, and the numbers that change.

        Raises:
            UserError: a document has a token that the model lacks, or cannot be rendered.
        """
        counts = Counts()
        rows = piece.documents(counts) if isinstance(piece, Reads) else piece
        found = list(self._tokenized(rows, counts))
        kept = [each for each in found if len(each.ids) > 1]
        counts.too_short += len(found) - len(kept)
        return self._joined(kept) if kept else None, counts

    def _ids(
        self, columns: Iterable[tuple[np.ndarray, np.ndarray]], file: str, counts: Counts
    ) -> Iterator[Encoded]:
        """Yield the documents of a file that are token ids already."""
        before, first = counts.documents, 1
        for ids, lengths in columns:
            counts.documents += int((lengths > 0).sum())
            counts.empty += int((lengths == 0).sum())
            counts.too_short += int((lengths == 1).sum())
            kept = lengths > 1
            rows = first + np.flatnonzero(kept)
            first += len(lengths)
            if kept.any():
                tokens = ids[np.repeat(kept, lengths)]
                mask, place = np.ones(len(tokens), bool), partial(_row, file, rows)
                yield self._encoded(tokens, mask, lengths[kept], place)
        if counts.documents == before:
            raise no_document(file)

    def _joined(self, documents: Sequence[Tokenized]) -> Encoded:
        lengths = np.array([len(each.ids) for each in documents])
        tokens = np.concatenate([each.ids for each in documents])
        masks = [each.mask for each in documents if each.mask is not None]
        mask = np.concatenate(masks) if masks else np.ones(len(tokens), bool)
        return self._encoded(tokens, mask, lengths, lambda number: documents[number].place)

    def _encoded(
        self,
        tokens: np.ndarray,
        mask: np.ndarray,
        lengths: np.ndarray,
        place: Callable[[int], str],
    ) -> Encoded:
        ends = np.cumsum(lengths)
        starts = ends - lengths
        outside = np.flatnonzero((tokens < 0) | (tokens >= self.vocabulary))
        if len(outside):
            raise UserError(
                f"token id {tokens[outside[0]]}, the model has {self.vocabulary}",
                place=place(int(np.searchsorted(ends, outside[0], "right"))),
                remedy="name the tokenizer of this model, or another id_offset",
            )
        mask[starts] = False
        trained = np.add.reduceat(mask, starts, dtype=np.int64)
        text_bytes = np.add.reduceat(np.where(mask, self.text_bytes[tokens], 0), starts)
        return Encoded(tokens.astype(self.dtype), mask, lengths, trained, text_bytes)

    def _tokenized(self, rows: Sequence[Document], counts: Counts) -> Iterator[Tokenized]:
        first = rows[0].value  # a source has documents of one type
        if isinstance(first, str):
            texts = [cast(str, row.value) for row in rows]
            found = self.files.tokenizer.encode_batch_fast(texts)
            for row, each in zip(rows, found, strict=True):
                ids = each.ids
                if self.end is not None and not any(each.special_tokens_mask):
                    ids = [*ids, self.end]
                yield Tokenized(row.place, np.array(ids, np.int64), None)
        elif isinstance(first, np.ndarray):
            yield from (Tokenized(row.place, cast(np.ndarray, row.value), None) for row in rows)
        else:
            yield from self._conversations(rows, counts)

    def _conversations(self, rows: Sequence[Document], counts: Counts) -> Iterator[Tokenized]:
        """Yield those that are kept; the others are counted."""
        rendered = [(row, *self._rendered(row)) for row in rows]
        assert self.template is not None, "something was rendered"
        self.template.require_assistant_message(parts=only_parts(self.template, ASSISTANT))
        spoken = [each for each in rendered if each[2]]
        counts.without_assistant += len(rendered) - len(spoken)
        texts = [text for _, text, _ in spoken]
        encodings = self.files.tokenizer.encode_batch(texts, add_special_tokens=False)
        for (row, _, spans), found in zip(spoken, encodings, strict=True):
            if self.longest is not None and len(found.ids) > self.longest:
                counts.too_long += 1
                continue
            yield Tokenized(row.place, np.array(found.ids, np.int64), self._mask(found, spans))

    def _rendered(self, row: Document) -> tuple[str, list[tuple[int, int]]]:
        """Return a conversation as text, and the spans of what the assistant says."""
        conversation = cast(Conversation, row.value)
        if self.template is None:
            raise UserError(
                "conversations need a chat template, and the tokenizer has none",
                place=self.files.place,
                remedy="add chat_template.jinja beside tokenizer.json",
            )
        try:
            text, spans = spans_of(self.template, conversation)
        except UserError as error:
            both = f"{row.place}; {error.place or self.files.place}"
            remedy = error.remedy or "mend the template, or remove the conversation"
            raise UserError(error.thing, place=both, remedy=remedy) from error
        spans = [(begin, stop) for begin, stop in spans if begin < stop]
        if not spans and any(
            each["role"] == ASSISTANT and (each.get("content") or each.get("tool_calls"))
            for each in conversation.messages
        ):
            raise UserError(
                "the chat template does not render what the assistant says",
                place=f"{row.place}; {self.files.place}",
                remedy="mark the assistant's part in the template with {% generation %}",
            )
        return text, spans

    def _mask(self, found: Any, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """Return which tokens reach into a span, as transformers does: bool [n].

        Where the template does not mark spans, they hold what follows the end token too, such as a
        line feed; that is not trained. Some tokenizers leave white space out of the offsets:
        such a token has no characters.
        """
        ids, (begins, stops) = np.array(found.ids), np.array(found.offsets).reshape(-1, 2).T
        mask = np.zeros(len(ids), bool)
        for begin, stop in spans:
            inside = np.flatnonzero((begins < stop) & (stops > begin))
            if not len(inside):
                continue
            last = inside[-1]
            if self.template is not None and not self.template.marks_assistant:
                last = max(inside[ids[inside] == self.end], default=last)
            mask[inside[0] : last + 1] = True
        return mask


def _taken(encoded: Iterable[tuple[Encoded | None, Counts]], counts: Counts) -> Iterator[Encoded]:
    """Yield what was encoded, and add the numbers up."""
    for each, change in encoded:
        counts.add(change)
        if each is not None:
            yield each


def _row(file: str, rows: np.ndarray, number: int) -> str:
    """Return the place of a document, by the numbers of the rows that have one."""
    return f"{file}, row {rows[number]}"


def token_bytes(tokenizer: Tokenizer, vocabulary: int) -> np.ndarray:
    """Return the bytes of text that each token stands for; none for special tokens.

    Args:
        tokenizer: byte-level, SentencePiece with bytes, or of plain text.
        vocabulary: rows of the model's embedding.

    Returns:
        int64 [vocabulary].
    """
    byte_level = '"ByteLevel"' in json.dumps(json.loads(tokenizer.to_str())["decoder"])
    added = tokenizer.get_added_tokens_decoder()
    found = np.zeros(vocabulary, np.int64)
    for token, number in tokenizer.get_vocab(with_added_tokens=True).items():
        if number >= vocabulary or (number in added and added[number].special):
            continue
        if byte_level and number not in added:
            found[number] = len(token)  # a character stands for each byte
        elif re.fullmatch("<0x[0-9A-F]{2}>", token):
            found[number] = 1
        else:
            found[number] = len(token.replace("\u2581", " ").encode())
    return found


def _size(value: str | np.ndarray | Conversation) -> int:
    """Return how many characters or ids a document has, about."""
    if not isinstance(value, Conversation):
        return len(value)
    parts = [message.get("content") for message in value.messages]
    return sum(len(str(part)) for part in (*parts, value.tools or ""))


def _batches(rows: Iterator[Document]) -> Iterator[list[Document]]:
    """Yield the rows in lists, none much larger than its last row."""
    batch, size = list[Document](), 0
    for row in rows:
        batch.append(row)
        size += _size(row.value)
        if len(batch) == _BATCH or size > _BATCH_SIZE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
