"""Documents of a source as tokens: plain text, token ids, or conversations with a mask."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from learner_jax.corpus.documents import Counts
from learner_jax.corpus.sources import Messages, Row, read_rows
from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from runspec.core.spec.schema import SUPERVISED, RunSpec, Source
from runspec.core.tokenizer_files import ASSISTANT, ChatTemplate, TokenizerFiles

PRETRAIN, SFT = SUPERVISED
_BATCH = 512
"""Documents that are tokenized together."""


class Encoded(NamedTuple):
    """A document."""

    tokens: np.ndarray
    """int64 [n]."""
    mask: np.ndarray | None
    """bool [n]: whether the token is trained; None: all but the first."""
    bytes: int
    """Of the text that the trained tokens stand for, in UTF-8."""


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
        return cls(files, template, masked, vocabulary, longest)

    @property
    def digest(self) -> str:
        """Names all that tokens follow from besides the documents."""
        origins = {
            "tokenizer": digest_bytes(self.files.tokenizer.to_str().encode()),
            "special": self.files.special_tokens,
            "template": None if self.template is None else self.template.source,
            "masked": self.masked,
            "longest": self.longest,
        }
        return digest_bytes(canonical_json(origins))

    @property
    def dtype(self) -> str:
        """Type of the stored tokens."""
        return "<u2" if self.vocabulary <= 1 << 16 else "<u4"

    def encoded(self, source: Source, files: Sequence[Path], counts: Counts) -> Iterator[Encoded]:
        """Yield the documents of a source, in the order of its files.

        Args:
            source: of the spec.
            files: its files, in order.
            counts: receives the numbers.

        Raises:
            UserError: a document cannot be read, or has a token that the model lacks.
        """
        rows = read_rows(source, files, counts, SFT if self.masked else PRETRAIN)
        while batch := list(islice(rows, _BATCH)):
            for row, each in zip(batch, self._batch(batch, counts), strict=True):
                if each is None:
                    continue
                if each.tokens.size and int(each.tokens.max()) >= self.vocabulary:
                    raise UserError(
                        f"token id {int(each.tokens.max())}, the model has {self.vocabulary}",
                        place=row.place,
                        remedy="name the tokenizer of this model, or another id_offset",
                    )
                if each.tokens.size and int(each.tokens.min()) < 0:
                    raise UserError(
                        f"token id {int(each.tokens.min())}",
                        place=row.place,
                        remedy="name another id_offset",
                    )
                yield each

    def _batch(self, rows: Sequence[Row], counts: Counts) -> Iterable[Encoded | None]:
        texts = [row.value for row in rows if isinstance(row.value, str)]
        if texts:  # a source has documents of one type
            return self._texts(texts)
        ids = [row.value for row in rows if isinstance(row.value, np.ndarray)]
        if ids:
            return [self._of_ids(tokens) for tokens in ids]
        return [self._conversation(row.place, cast(Messages, row.value), counts) for row in rows]

    def _texts(self, texts: Sequence[str]) -> Iterator[Encoded]:
        end = self.files.special_id("eos_token")
        for text, found in zip(texts, self.files.tokenizer.encode_batch(texts), strict=True):
            ids = found.ids
            if end is not None and not any(found.special_tokens_mask):
                ids = [*ids, end]
            yield self._all(np.array(ids, np.int64), len(text.encode()))

    def _all(self, tokens: np.ndarray, text_bytes: int) -> Encoded:
        mask = None
        if self.masked:
            mask = np.ones(len(tokens), bool)
            mask[:1] = False
        return Encoded(tokens, mask, text_bytes)

    def _of_ids(self, tokens: np.ndarray) -> Encoded:
        """Tokens as they are; their text is what the tokenizer makes of them."""
        text = self.files.tokenizer.decode(tokens.clip(0).tolist())
        return self._all(tokens, len(text.encode()))

    def _conversation(self, place: str, messages: Messages, counts: Counts) -> Encoded | None:
        """Tokens and mask of a conversation; None, and counted, if it is left out."""
        if self.template is None:
            raise UserError(
                "conversations need a chat template, and the tokenizer has none",
                place=self.files.place,
                remedy="add chat_template.jinja beside tokenizer.json",
            )
        if not any(message["role"] == ASSISTANT for message in messages):
            counts.without_assistant += 1
            return None
        try:
            text, spans = self.template.spans(messages)
        except UserError as error:
            both = f"{place}; {error.place or self.files.place}"
            raise UserError(error.thing, place=both, remedy=error.remedy) from error
        if not any(begin < stop for begin, stop in spans):
            raise UserError(
                "the chat template does not render what the assistant says",
                place=f"{place}; {self.files.place}",
                remedy="mark the assistant's part in the template with {% generation %}",
            )
        found = self.files.tokenizer.encode(text, add_special_tokens=False)
        if self.longest is not None and len(found.ids) > self.longest:
            counts.too_long += 1
            return None
        mask = _mask(np.array(found.ids), found.offsets, spans, self.files.special_id("eos_token"))
        mask[:1] = False
        trained = sum(len(text[begin:stop].encode()) for begin, stop in spans)
        return Encoded(np.array(found.ids, np.int64), mask, trained)


def _mask(
    ids: np.ndarray, offsets: Any, spans: Sequence[tuple[int, int]], end: int | None
) -> np.ndarray:
    """Which tokens lie in a span; after the end token of a span, none."""
    begins, stops = np.array(offsets).T
    mask = np.zeros(len(ids), bool)
    for begin, stop in spans:
        inside = np.flatnonzero((begins >= begin) & (stops <= stop) & (stops > begins))
        ended = inside[ids[inside] == end]
        mask[inside if not len(ended) else inside[inside <= ended[-1]]] = True
    return mask
