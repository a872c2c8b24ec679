"""Documents of a source as tokens: plain text, token ids, or conversations with a mask."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
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
            "vocabulary": self.vocabulary,
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
                foreign = each.tokens[(each.tokens < 0) | (each.tokens >= self.vocabulary)]
                if foreign.size:
                    raise UserError(
                        f"token id {foreign[0]}; the model's are 0 to {self.vocabulary - 1}",
                        place=row.place,
                        remedy="name the tokenizer of this model, or another id_offset",
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
            # The first token is not trained; one that the tokenizer adds has no text.
            first = found.token_to_chars(0) if found.ids else None
            trained = text if first is None else text[first[1] :]
            yield self._all(np.array(ids, np.int64), len(trained.encode()))

    def _all(self, tokens: np.ndarray, text_bytes: int) -> Encoded:
        mask = None
        if self.masked:
            mask = np.ones(len(tokens), bool)
            mask[:1] = False
        return Encoded(tokens, mask, text_bytes)

    def _of_ids(self, tokens: np.ndarray) -> Encoded:
        """Tokens as they are; their text is what the tokenizer makes of them."""
        return self._all(tokens, self._bytes(tokens[1:].clip(0, self.vocabulary)))

    def _bytes(self, tokens: np.ndarray) -> int:
        """Bytes of the text of some tokens; special ones have none."""
        return len(self.files.tokenizer.decode(tokens.tolist()).encode())

    def _conversation(self, place: str, messages: Messages, counts: Counts) -> Encoded | None:
        """Tokens and mask of a conversation; None, and counted, if it is left out."""
        if self.template is None:
            raise UserError(
                "conversations need a chat template, and the tokenizer has none",
                place=self.files.place,
                remedy="add chat_template.jinja beside tokenizer.json",
            )
        if not any(map(_answers, messages)):
            counts.without_assistant += 1
            return None
        try:
            text, spans = self.template.spans(messages)
        except UserError as error:
            both = f"{place}; {error.place or self.files.place}"
            raise UserError(error.thing, place=both, remedy=error.remedy) from error
        found = self.files.tokenizer.encode(text, add_special_tokens=False)
        if self.longest is not None and len(found.ids) > self.longest:
            counts.too_long += 1
            return None
        ids = np.array(found.ids, np.int64)
        mask = _mask(ids, found.offsets, spans, self.files.special_id("eos_token"))
        mask[:1] = False
        if not mask.any():
            raise UserError(
                "the chat template does not render what the assistant says as tokens of its own",
                place=f"{place}; {self.files.place}",
                remedy="mark the assistant's part in the template with {% generation %}",
            )
        return Encoded(ids, mask, self._bytes(ids[mask]))


def _answers(message: Mapping[str, Any]) -> bool:
    """Whether the assistant says something in a message."""
    return message["role"] == ASSISTANT and any(map(message.get, ("content", "tool_calls")))


def _mask(
    ids: np.ndarray, offsets: Any, spans: Sequence[tuple[int, int]], end: int | None
) -> np.ndarray:
    """Which tokens lie in a span; after the end token of a span, none.

    A token of white space can have no characters: some tokenizers leave it out of the offsets.
    """
    begins, stops = np.array(offsets, np.int64).reshape(-1, 2).T
    mask = np.zeros(len(ids), bool)
    for begin, stop in spans:
        inside = np.flatnonzero((begins >= begin) & (stops <= stop) & (stops > begin))
        ended = inside[ids[inside] == end]
        mask[inside if not len(ended) else inside[inside <= ended[-1]]] = True
    return mask
