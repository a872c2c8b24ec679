"""The corpus of a run: its documents as tokens on disk, packed into rows that can be read alone.

A folder of the cache holds the tokens of all documents, one after the other, and what is known of
each document. The rows follow from these, from the seed and from the length of a row
(`learner_jax.corpus.layout`), so that any process can read any row.
"""

from __future__ import annotations

import json
import logging
import os
from array import array
from collections.abc import Iterable
from dataclasses import asdict
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from learner_jax.corpus.documents import Counts, reported
from learner_jax.corpus.encoding import Encoded, Encoder
from learner_jax.corpus.layout import Rows, epoch_order, pack_documents, split_documents
from learner_jax.corpus.rows import CorpusRows
from learner_jax.packing import TokenBatch
from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.files import locked, new_directory, remove_leftovers
from runspec.core.hashing import digest_bytes
from runspec.core.models.family import load_config
from runspec.core.spec.documents import is_generated
from runspec.core.spec.schema import RunSpec, Source
from runspec.core.spec.source_files import file_digest, source_files

FORMAT = 1
"""Part of the digest: a change of what a corpus holds raises it."""
OTHERS_S = 24 * 3600.0
"""How long another process may take to make the same corpus."""
_TOKENS, _MASK, _DOCUMENTS, _META = "tokens.bin", "mask.bin", "documents.npy", "meta.json"


class Corpus:
    """The rows of a run.

    Args:
        folder: made by `open_corpus`.
        spec: of the run, which trains on documents.

    Raises:
        UserError: the documents do not fill a row, or are all held out.
    """

    def __init__(self, folder: Path, spec: RunSpec) -> None:
        assert spec.supervised is not None
        meta = json.loads((folder / _META).read_bytes())
        self.counts = Counts(**{**meta["counts"], "by_file": {}})
        self._tokens = np.memmap(folder / _TOKENS, np.dtype(meta["dtype"]), "r")
        masked = meta["masked"]
        self._mask = np.memmap(folder / _MASK, np.bool_, "r") if masked else None
        ends, text_bytes, self._sources = np.load(folder / _DOCUMENTS).T
        self._weights = np.array([source.weight for source in spec.data.sources], np.float32)
        self._length, self._seed = spec.learner.packing.tokens, spec.seed
        held_out = spec.supervised.held_out.tokens
        following = {"seed": spec.seed, "row": self._length, "held_out": held_out}
        origins = {"tokens": meta["digest"], "weights": self._weights.tolist(), **following}
        self.digest = digest_bytes(canonical_json(origins))
        """Names all that the rows follow from."""

        lengths = np.diff(ends, prepend=0)
        trained, kept = split_documents(lengths, held_out, spec.seed)
        self._rows = pack_documents(trained, ends, self._length)
        self._held_out = pack_documents(kept, ends, self._length)
        if self._rows.count == 0:
            raise UserError(
                f"the documents have {lengths.sum()} tokens, and {held_out} are held out",
                place="algorithm.held_out.tokens",
                remedy="add documents, or lower it",
            )
        self._order = lru_cache(2)(partial(epoch_order, self._rows.count, self._seed))
        self.documents = len(trained)
        """Documents to train on."""
        self.tokens = int(lengths[trained].sum())
        """Their tokens."""
        self.trained_tokens = self._targets(self._rows)
        """Tokens in the loss of an epoch."""
        self.bytes_per_token = float(text_bytes[trained].sum()) / self.trained_tokens
        """Mean bytes of text for each of them."""
        self.held_out_tokens = self._targets(self._held_out)
        """Held-out tokens in the loss."""
        self.held_out_bytes = int(text_bytes[kept].sum())
        """Bytes of their text."""

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

    def _targets(self, rows: Rows) -> int:
        """Tokens in the loss."""
        if self._mask is None:
            return int((rows.length - 1).sum())
        return sum(
            int(self._mask[start + 1 : start + length].sum())
            for start, length in zip(rows.start.tolist(), rows.length.tolist(), strict=True)
        )

    def _filled(self, table: Rows, rows: np.ndarray) -> CorpusRows:
        """The arrays of some rows of a table, [R, tokens]."""
        size = self._length
        begin, stop = np.searchsorted(table.row, [rows, rows + 1])
        count = stop - begin
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
        weight = self._weights[self._sources[table.document[piece]]]
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
    cache.mkdir(parents=True, exist_ok=True)
    held = UserError(
        f"another process has held the cache for {OTHERS_S / 3600:.0f} h",
        place=str(cache),
        remedy="end that process, or wait for it",
    )
    waiting = partial(log.info, "waiting for another process that makes a corpus in %s", cache)
    with locked(os.open(cache, os.O_RDONLY), OTHERS_S, held, waiting):
        folder = cache / digest
        if not folder.is_dir():
            remove_leftovers(cache)
            log.info("tokenizing the documents of %d sources", len(files))
            with new_directory(folder) as made:
                _make(made, spec.data.sources, files, encoder, digest, log)
    corpus = Corpus(folder, spec)
    log.info(
        "corpus %s: %d documents of %d tokens, %d rows of %d, %.1f %% padding; held out %d tokens",
        *(corpus.digest[:16], corpus.documents, corpus.tokens, corpus.rows),
        spec.learner.packing.tokens,
        100 * (1 - corpus.tokens / (corpus.rows * spec.learner.packing.tokens)),
        corpus.held_out_tokens,
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


def _make(
    folder: Path,
    sources: Iterable[Source],
    files: dict[str, list[Path]],
    encoder: Encoder,
    digest: str,
    log: logging.Logger,
) -> None:
    """Write the files of a corpus; the caller renames the folder."""
    counts = Counts()
    numbers, end = array("q"), 0  # end, bytes and source of each document
    with (folder / _TOKENS).open("wb") as tokens, (folder / _MASK).open("wb") as mask:
        for number, source in enumerate(sources):
            found = encoder.encoded(source, files[source.name], counts)
            for each in reported(found, counts, log):
                end += len(each.tokens)
                _write(each, encoder, tokens, mask)
                numbers.extend((end, each.bytes, number))
    if not encoder.masked:
        (folder / _MASK).unlink()
    if not numbers:
        raise UserError(
            f"no document can be trained on: {counts}",
            place="data.sources",
            remedy="add documents",
        )
    np.save(folder / _DOCUMENTS, np.frombuffer(numbers, np.int64).reshape(-1, 3))
    said = {name: value for name, value in asdict(counts).items() if name != "by_file"}
    meta = {"dtype": encoder.dtype, "masked": encoder.masked, "digest": digest, "counts": said}
    (folder / _META).write_bytes(canonical_json(meta))


def _write(each: Encoded, encoder: Encoder, tokens: BinaryIO, mask: BinaryIO) -> None:
    tokens.write(each.tokens.astype(encoder.dtype).tobytes())
    if encoder.masked:
        assert each.mask is not None
        mask.write(each.mask.tobytes())
