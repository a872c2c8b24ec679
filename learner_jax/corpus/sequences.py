"""Scores and embeds whole documents: bits a character, and mean hidden states.

A document that is longer than the context is cut into windows, each with the tokenizer's special
tokens. Windows are packed into rows of one shape, so one program is compiled. Documents stream
through; only some rows are in memory at a time.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, tee
from pathlib import Path
from typing import Any, BinaryIO

import jax
import numpy as np
from jaxtyping import Array, Float
from tokenizers import Tokenizer

from learner_jax.corpus.documents import Counts, Document, Kind, read_all, reported
from learner_jax.model import bind
from learner_jax.packing import TokenBatch
from learner_jax.score import ROW_MULTIPLE, in_rows, load_model, token_scores, writable
from learner_jax.sharding import Execution
from runspec.core.errors import UserError
from runspec.core.files import atomic_file, write_atomic
from runspec.core.models.config import ModelConfig
from runspec.core.models.family import load_config
from runspec.core.tokenizer_files import read_tokenizer

ROW_TOKENS = 1 << 11
"""Shortest row; many short documents share one."""
PACKED_TOKENS = 1 << 17
"""Tokens that are packed together."""


@dataclass(frozen=True)
class Window:
    """A piece of a document, as the model reads it."""

    document: int
    """Number of the document, from 0."""
    ids: np.ndarray
    """i32 [n], special tokens included."""
    counted: np.ndarray
    """bool [n]: no special token."""
    characters: np.ndarray
    """i32 [n]: characters that end with each token; tokens may share one of several bytes."""


@dataclass(frozen=True)
class Measured:
    """Bits of a document's tokens, and how many characters they stand for.

    The first token of a window has no log-prob unless the tokenizer puts a special token before it.
    """

    name: str
    tokens: int
    characters: int
    bits: float


def windows(
    documents: Iterable[Document], tokenizer: Tokenizer, config: ModelConfig, context: int
) -> Iterator[Window]:
    """Yield the windows of each document, of at most `context` tokens.

    Raises:
        UserError: a token is beyond the model's vocabulary, or a document has no two tokens.
    """
    tokenizer.no_padding()
    tokenizer.enable_truncation(context)
    for number, document in enumerate(documents):
        encoded = tokenizer.encode(document.value)
        for piece in (encoded, *encoded.overflowing):
            ids = np.array(piece.ids, np.int32)
            if ids.size and ids.max() >= config.vocab_size:
                raise UserError(
                    f"token {ids.max()} of a vocabulary of {config.vocab_size}",
                    place=f"document {document.name}",
                    remedy="the tokenizer is not this model's",
                )
            begins, ends = np.array(piece.offsets, np.int32).reshape(-1, 2).T
            before = np.maximum.accumulate(np.concatenate([[0], ends[:-1]]))
            characters = np.maximum(ends - np.maximum(begins, before), 0)
            if len(ids) > 1:
                counted = ~np.array(piece.special_tokens_mask, bool)
                yield Window(number, ids, counted, characters)
            elif piece is encoded:
                raise UserError(
                    "one token, which has no log-prob",
                    place=f"document {document.name}",
                    remedy="leave it out",
                )


@dataclass(frozen=True)
class LoadedModel:
    """A Hugging Face model on a mesh, and its tokenizer."""

    params: Any
    config: ModelConfig
    execution: Execution
    tokenizer: Tokenizer


def bits(model: LoadedModel, documents: Iterable[Document], context: int) -> Iterator[Measured]:
    """Yield the bits of each document: - log2 p of its tokens, each given those before it."""
    for name, pairs in _by_document(token_scores, model, documents, context):
        tokens, characters, nats = 0, 0, 0.0
        for window, logprobs in pairs:
            counted = window.counted[1:]
            tokens += int(counted.sum())
            characters += int(window.characters[1:].sum(where=counted))
            nats -= float(logprobs[:-1].sum(where=counted, dtype=np.float64))
        yield Measured(name, tokens, characters, nats / math.log(2))


def means(
    model: LoadedModel, documents: Iterable[Document], context: int
) -> Iterator[tuple[str, Float[np.ndarray, " D"]]]:
    """Yield name and mean of the last hidden states of each document, over all of its tokens."""
    for name, pairs in _by_document(_hidden, model, documents, context):
        total, count = np.zeros(model.config.hidden_size), 0
        for window, hidden in pairs:
            total += hidden.sum(axis=0, dtype=np.float64)
            count += len(window.ids)
        yield name, (total / count).astype(np.float32)


def _by_document(
    program: Callable[..., Array], model: LoadedModel, documents: Iterable[Document], context: int
) -> Iterator[tuple[str, Iterator[tuple[Window, np.ndarray]]]]:
    """Yield the name of each document, and its windows with what a program computes of them."""
    names: list[str] = []

    def named() -> Iterator[Document]:
        for document in documents:
            names.append(document.name)
            yield document

    mesh = model.execution.mesh
    assert mesh is not None, "`load_model` gives one"
    multiple = ROW_MULTIPLE * mesh.shape["context"]
    tokens = -(-max(ROW_TOKENS, context) // multiple) * multiple
    found, read = tee(windows(named(), model.tokenizer, model.config, context))
    values = in_rows(
        partial(program, config=model.config, execution=model.execution),
        model.params,
        mesh,
        (window.ids for window in read),
        tokens,
        mesh.shape["data"] * mesh.shape["fsdp"],
        PACKED_TOKENS,
    )
    pairs = zip(found, values, strict=True)
    for number, of_document in groupby(pairs, lambda pair: pair[0].document):
        yield names[number], of_document


@partial(jax.jit, static_argnames=("config", "execution"))
def _hidden(
    params: Any, batch: TokenBatch, *, config: ModelConfig, execution: Execution
) -> Float[Array, "B T D"]:
    policy = bind(config, params)
    return policy(batch.tokens, batch.segment_ids, batch.positions, execution).astype("float32")


@dataclass(frozen=True)
class Options:
    """Options of both commands."""

    model_dir: Path
    files: Sequence[Path]
    kind: Kind | None
    column: str
    context: int | None
    dtype: str | None
    mesh: str | None


def score_sequences(options: Options, out: Path | None, log: logging.Logger) -> None:
    """Write name, tokens, characters and bits a character of each document, tab-separated.

    Args:
        options: model and files.
        out: a file in place of standard output.
        log: receives progress.

    Raises:
        UserError: the model or a file cannot be read, a log-prob is not finite, or `out` cannot be
            written.
    """
    model, context = _ready(options, log)
    counts = Counts()
    documents = read_all(options.files, counts, kind=options.kind, column=options.column)
    with writable(out) as stream:
        stream.write("name\ttokens\tcharacters\tbits_per_character\n")
        for each in reported(bits(model, documents, context), counts, log):
            if not math.isfinite(each.bits):
                raise UserError("log-probs are not finite", place=f"document {each.name}")
            rate = each.bits / max(each.characters, 1)
            stream.write(f"{each.name}\t{each.tokens}\t{each.characters}\t{rate:.6g}\n")


def embed_sequences(options: Options, out: Path, names: Path | None, log: logging.Logger) -> None:
    """Write the mean hidden states of the documents, in order, as .npy: float32 [documents, D].

    Args:
        options: model and files.
        out: the file; it appears when all is written.
        names: a file for the documents' names, one a line; None for no file.
        log: receives progress.

    Raises:
        UserError: the model or a file cannot be read, or a file cannot be written.
    """
    model, context = _ready(options, log)
    counts, written = Counts(), list[str]()
    documents = read_all(options.files, counts, kind=options.kind, column=options.column)
    with atomic_file(out) as file:
        _write_header(file, 0, model.config.hidden_size)
        for name, mean in reported(means(model, documents, context), counts, log):
            file.write(mean.tobytes())
            written.append(name)
        file.seek(0)
        _write_header(file, len(written), model.config.hidden_size)
    if names is not None:
        write_atomic(names, "".join(f"{name}\n" for name in written).encode())


def _write_header(file: BinaryIO, rows: int, columns: int) -> None:
    """Write numpy's header, whose length does not depend on the number of rows."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (rows, columns)}
    np.lib.format.write_array_header_1_0(file, header)


def _ready(options: Options, log: logging.Logger) -> tuple[LoadedModel, int]:
    """Return the model, and the longest window."""
    config, tokenizer = (
        load_config(options.model_dir),
        read_tokenizer(options.model_dir / "tokenizer.json"),
    )
    context = options.context or config.max_position_embeddings
    config.check_length(context, place="--context")
    if context < (least := max(2, tokenizer.num_special_tokens_to_add(is_pair=False) + 1)):
        raise UserError(
            f"{context} tokens; a window has at least {least}, special tokens included",
            place="--context",
            remedy="raise it, or leave it to the model",
        )
    params, execution = load_model(
        options.model_dir, config, log, dtype=options.dtype, mesh=options.mesh
    )
    return LoadedModel(params, config, execution, tokenizer), context
