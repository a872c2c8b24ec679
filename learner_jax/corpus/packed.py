"""The corpus of a run: its documents as tokens on disk, packed into rows that can be read alone.

A folder of the cache holds the tokens of all documents, one after the other, and what is known of
each document. The rows follow from these, from the seed and from the length of a row, so that any
process can read any row. They are in a folder of their own: runs with another seed share the
tokens. Tables are written as they are made and mapped as they are read, and documents are packed a
shard of them at a time, so memory does not grow with the corpus.
"""

from __future__ import annotations

import json
import logging
import operator
from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from learner_jax.corpus import Counts, reported
from learner_jax.corpus.encoding import EncodeAll, Encoder
from learner_jax.corpus.processes import encoding
from learner_jax.corpus.rows import (
    Rows,
    RowsWriter,
    epoch_order,
    mapped,
    pack_documents,
    split_documents,
)
from learner_jax.packing import ARRAYS, TokenBatch
from runspec.core.canonical import canonical_json, digest_bytes
from runspec.core.errors import UserError
from runspec.core.files import locked, new_directory, open_folder_lock, remove_leftovers
from runspec.core.models.family import load_config
from runspec.core.schema import RunSpec, Source
from runspec.core.schema.source_files import file_digest, is_generated, source_files


@dataclass(frozen=True)
class CorpusRows:
    """Rows of whole documents, each document a segment of its own."""

    __pydantic_config__ = ARRAYS

    batch: TokenBatch
    """numpy int32 [R, tokens] each; a target is -1 where its token is not trained."""
    weights: np.ndarray
    """float32 [R, tokens]: loss weight of the target at each position, its source's `weight`; 0
    where none is trained."""


SHARD = 2**22
"""Documents that are ordered and packed together."""
FORMAT = 4
"""Part of the digest: a change of what a corpus holds raises it."""
OTHERS_S = 24 * 3600.0
"""How long another process may take to make the same corpus."""
_TOKENS, _MASK, _DOCUMENTS, _META = "tokens.bin", "mask.bin", "documents.bin", "meta.json"
_TRAINED, _HELD_OUT = "trained", "held_out"
_END, _TRAINED_TOKENS, _BYTES, _SOURCE = range(4)
"""Columns of the documents: where the tokens end, trained tokens, their bytes, the source."""


@dataclass(frozen=True)
class Totals:
    """Numbers of some documents, and of the rows that they are packed into."""

    documents: int
    cut: int
    """Documents that are longer than a row."""
    tokens: int
    trained_tokens: int
    """Tokens in the loss."""
    text_bytes: int
    """Bytes of the text that these stand for, in UTF-8."""

    @property
    def bytes_per_token(self) -> float:
        """Mean bytes of text for each token in the loss; special tokens stand for none."""
        return max(self.text_bytes, 1) / self.trained_tokens

    @classmethod
    def of(cls, documents: np.ndarray, lengths: np.ndarray, row: int) -> Totals:
        """Add up documents: their rows of the table, and tokens; a row has `row` tokens."""
        trained, text_bytes = (documents[:, each].sum() for each in (_TRAINED_TOKENS, _BYTES))
        cut, tokens = int((lengths > row).sum()), int(lengths.sum())
        return cls(len(lengths), cut, tokens, int(trained), int(text_bytes))

    def __add__(self, other: Totals) -> Totals:
        return Totals(*map(operator.add, astuple(self), astuple(other)))


class Corpus:
    """The rows of a run.

    Args:
        folder: holds the tokens; made by `open_corpus`.
        packed: holds the rows; made by `open_corpus`.
        spec: of the run, which trains on documents.
        digest: names all that the rows follow from.

    Raises:
        UserError: a file is damaged, or the documents do not fill a row.
    """

    def __init__(self, folder: Path, packed: Path, spec: RunSpec, digest: str) -> None:
        try:
            meta, said = (json.loads((each / _META).read_bytes()) for each in (folder, packed))
            self.counts = Counts(**meta["counts"])
            self._tokens = np.memmap(folder / _TOKENS, np.dtype(meta["dtype"]), "r")
            masked = meta["masked"]
            self._mask = np.memmap(folder / _MASK, np.bool_, "r") if masked else None
            self._documents = mapped(folder / _DOCUMENTS).reshape(-1, 4)
            self._rows, self._held_out = (Rows.load(packed / n) for n in (_TRAINED, _HELD_OUT))
            self.totals, self.kept = Totals(**said[_TRAINED]), Totals(**said[_HELD_OUT])
            """Numbers of the documents to train on, and of those held out."""
            flat = [self._tokens] if self._mask is None else [self._tokens, self._mask]
            if any(len(each) != meta["tokens"] for each in flat):
                raise ValueError("tokens are missing")
            if len(self._documents) != self.totals.documents + self.kept.documents:
                raise ValueError("documents are missing")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"damaged corpus: {error}",
                place=str(folder),
                remedy=f"remove it and {packed}: it is made again",
            ) from error
        if not self.totals.trained_tokens:
            raise UserError(
                f"no token can be trained: {self.kept.documents} documents of "
                f"{self.kept.tokens} tokens are held out, no other is left",
                place="algorithm.held_out.tokens",
                remedy="add documents, or lower it",
            )
        self._weights = np.array([source.weight for source in spec.data.sources], np.float32)
        self._length = spec.learner.packing.tokens
        self._order = lru_cache(2)(partial(epoch_order, self._rows.count, spec.seed))
        self.digest = digest

    @property
    def rows(self) -> int:
        """Rows of an epoch."""
        return self._rows.count

    def read(self, first: int, last: int) -> CorpusRows:
        """The rows [first, last) of the run; row i is of epoch i div `rows`."""
        numbers = np.arange(first, last)
        epochs, places = np.divmod(numbers, self.rows)
        rows = np.empty(len(numbers), np.int64)
        for epoch in np.unique(epochs).tolist():
            of_epoch = epochs == epoch
            rows[of_epoch] = self._order(epoch)[places[of_epoch]]
        return self._filled(self._rows, rows)

    def held_out(self) -> CorpusRows | None:
        """The rows of the held-out documents; None where none are held out."""
        count = self._held_out.count
        return self._filled(self._held_out, np.arange(count)) if count else None

    def _filled(self, table: Rows, rows: np.ndarray) -> CorpusRows:
        """The arrays of some rows of a table, [R, tokens]."""
        size = self._length
        begin, count = table.first[rows], table.first[rows + 1] - table.first[rows]
        piece = _ranges(begin, count)
        row = np.repeat(np.arange(len(rows)), count)
        length, start = table.length[piece], table.start[piece]
        # Where each piece begins in its row, and then where each of its tokens goes.
        ahead = np.cumsum(length) - length
        first_of_row = np.repeat(ahead[np.cumsum(count) - count], count)
        column = ahead - first_of_row
        source, position = _ranges(start, length), _ranges(np.zeros_like(start), length)
        target_at = np.repeat(row * size + column, length) + position

        shape = len(rows), size
        batch = TokenBatch(*(np.zeros(shape, np.int32) for _ in range(4)))
        weights = np.zeros(shape, np.float32)
        batch.targets[:] = -1
        batch.tokens.reshape(-1)[target_at] = self._tokens[source]
        batch.positions.reshape(-1)[target_at] = position
        number = _ranges(np.ones_like(count), count)
        batch.segment_ids.reshape(-1)[target_at] = np.repeat(number, length)
        # A position predicts the next token of its piece; the last one predicts none.
        predicts = position < np.repeat(length, length) - 1
        if self._mask is not None:
            last = len(self._tokens) - 1
            predicts &= self._mask[np.minimum(source + 1, last)]
        at, token = target_at[predicts], source[predicts] + 1
        batch.targets.reshape(-1)[at] = self._tokens[token]
        weight = self._weights[self._documents[table.document[piece], _SOURCE]]
        weights.reshape(-1)[at] = np.repeat(weight, length)[predicts]
        return CorpusRows(batch, weights)


def _ranges(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ... (count[0] numbers), first[1], ...; int64."""
    before = np.cumsum(count) - count
    return np.arange(int(count.sum())) + np.repeat(first - before, count)


def open_corpus(spec: RunSpec, model_dir: Path, cache: Path, log: logging.Logger) -> Corpus:
    """Find the corpus of a run in the cache, or make it.

    Args:
        spec: of the run, which trains on documents.
        model_dir: holds the tokenizer's files.
        cache: folder of corpora; processes that make the same one wait for one another.
        log: receives progress and the counts.

    Raises:
        UserError: a file or the tokenizer cannot be read, or the documents do not fill a row.
    """
    encoder = Encoder.of(spec, model_dir, load_config(model_dir).vocab_size)
    files = {source.name: _files(source) for source in spec.data.sources}
    digest = _digest(spec, encoder, files)
    following = _rows_digest(spec, digest)
    cache.mkdir(parents=True, exist_ok=True)
    held = UserError(
        f"another process has held the cache for {OTHERS_S / 3600:.0f} h",
        place=str(cache),
        remedy="end that process, or wait for it",
    )
    waiting = partial(log.info, "waiting for another process that makes a corpus in %s", cache)
    with locked(open_folder_lock(cache), OTHERS_S, held, waiting):
        remove_leftovers(cache)
        folder = cache / digest
        if not folder.is_dir():
            log.info("tokenizing the documents of %d sources", len(files))
            others = encoding(encoder, (spec, model_dir, encoder.vocabulary))
            with new_directory(folder) as made, others as encode_all:
                _make(made, spec.data.sources, files, encoder, encode_all, log)
        packed = cache / following
        if not packed.is_dir():
            with new_directory(packed) as made:
                _pack(made, folder, spec)
    corpus = Corpus(folder, packed, spec, following)
    totals, row = corpus.totals, spec.learner.packing.tokens
    log.info(
        "corpus %s: %d documents of %d tokens, %d rows of %d, %.1f %% padding, %d documents cut; "
        "held out %d tokens",
        *(corpus.digest[:16], totals.documents, totals.tokens, corpus.rows, row),
        100 * (1 - (totals.tokens / (corpus.rows * row))),
        *(totals.cut, corpus.kept.trained_tokens),
    )
    return corpus


def _files(source: Source) -> list[Path]:
    """The files of a source, in order; none of one that is generated."""
    if is_generated(source):
        return []
    files = list(source_files(source).values())
    if not files:
        raise UserError(
            "names no files",
            place=f"data.sources.{source.name}.uri",
            remedy="name a file, a folder or a pattern",
        )
    return files


def _digest(spec: RunSpec, encoder: Encoder, files: dict[str, list[Path]]) -> str:
    """Names the tokens of a corpus by all that they follow from."""
    sources = [
        {
            "kind": source.kind,
            "params": source.params,
            "files": [file_digest(path) for path in files[source.name]],
        }
        for source in spec.data.sources
    ]
    origins: dict[str, Any] = {"format": FORMAT, "sources": sources, "tokenizer": encoder.digest}
    return digest_bytes(canonical_json(origins))


def _rows_digest(spec: RunSpec, digest: str) -> str:
    """Names the rows by all that they follow from: tokens, seed, length of a row, ..."""
    assert spec.supervised is not None
    origins = {
        "tokens": digest,
        "weights": [source.weight for source in spec.data.sources],
        "seed": spec.seed,
        "row": spec.learner.packing.tokens,
        "held_out": spec.supervised.held_out.tokens,
    }
    return digest_bytes(canonical_json(origins))


def _make(
    folder: Path,
    sources: Iterable[Source],
    files: dict[str, list[Path]],
    encoder: Encoder,
    encode_all: EncodeAll,
    log: logging.Logger,
) -> None:
    """Write tokens, masks and the table of documents; the caller renames the folder."""
    counts, ended = Counts(), False
    end = 0
    with (
        (folder / _TOKENS).open("wb") as tokens,
        (folder / _MASK).open("wb") as mask,
        (folder / _DOCUMENTS).open("wb") as table,
    ):
        for number, source in enumerate(sources):
            documents = encoder.encoded(source, files[source.name], counts, encode_all)
            for each in reported(documents, counts, log):
                tokens.write(each.tokens.tobytes())
                if encoder.masked:
                    mask.write(each.mask.tobytes())
                ends, many = end + np.cumsum(each.lengths), np.full(len(each.lengths), number)
                rows = np.stack([ends, each.trained, each.text_bytes, many], axis=1)
                table.write(rows.astype("<i8").tobytes())
                end = int(ends[-1])
                ended = ended or bool((each.tokens[each.mask] == encoder.end).any())
    if not encoder.masked:
        (folder / _MASK).unlink()
    if not end:
        raise UserError(
            f"no document can be trained on: {counts}",
            place="data.sources",
            remedy="add documents",
        )
    if encoder.end is not None and not ended:
        log.warning("no trained token is the end token: the model does not learn to stop")
    meta = {"dtype": encoder.dtype, "masked": encoder.masked, "tokens": end}
    meta["counts"] = asdict(counts)
    (folder / _META).write_bytes(canonical_json(meta))


def _pack(folder: Path, corpus: Path, spec: RunSpec) -> None:
    """Write the rows of a corpus; the caller renames the folder."""
    assert spec.supervised is not None
    table, row = mapped(corpus / _DOCUMENTS).reshape(-1, 4), spec.learner.packing.tokens
    asked, tokens = spec.supervised.held_out.tokens, int(table[-1, _END])
    writers = {name: RowsWriter(folder / name) for name in (_TRAINED, _HELD_OUT)}
    totals = dict.fromkeys(writers, Totals(0, 0, 0, 0, 0))
    for shard, first in enumerate(range(0, len(table), SHARD)):
        documents = np.array(table[first : first + SHARD])
        begin = int(table[first - 1, _END]) if first else 0
        ends = documents[:, _END] - begin
        lengths = np.diff(ends, prepend=0)
        its_share = -(-asked * int(ends[-1]) // tokens)
        split = split_documents(lengths, its_share, spec.seed, shard)
        for (name, writer), numbers in zip(writers.items(), split, strict=True):
            rows = pack_documents(numbers, ends, row)
            rows = replace(rows, start=rows.start + begin, document=rows.document + first)
            writer.add(rows)
            totals[name] += Totals.of(documents[numbers], lengths[numbers], row)
    for writer in writers.values():
        writer.close()
    said = {name: asdict(each) for name, each in totals.items()}
    (folder / _META).write_bytes(canonical_json(said))
