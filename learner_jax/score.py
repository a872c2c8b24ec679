"""Scores given tokens, to compare a model with transformers or vLLM; scores and embeds documents.

A document that is longer than the context is cut into windows, each with the tokenizer's special
tokens. Documents stream through; only some rows are in memory at a time.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby, tee
from pathlib import Path
from typing import IO, Any, BinaryIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float
from tokenizers import Tokenizer

from learner_jax.corpus import Counts, Document, Kind, read_all, reported
from learner_jax.leaves import load_params
from learner_jax.model import bind
from learner_jax.packing import Sample, TokenBatch, pack
from learner_jax.sharding import Execution, full_float32, make_mesh, shard_batch
from learner_jax.step import policy_logprobs
from runspec.core import schema
from runspec.core.errors import UserError
from runspec.core.files import atomic_file, write_atomic
from runspec.core.models import ModelConfig, xla_threads
from runspec.core.models.family import load_config
from runspec.core.tokenizer_files import read_tokenizer

MAX_LINE_BYTES = 1 << 24
MICROBATCH_TOKENS = 1 << 13
"""Tokens that a device computes at a time, unless one line is longer."""
WINDOW_TOKENS = 1 << 20
"""Tokens that are packed together; their log-probs are printed before the next are computed."""
ROW_MULTIPLE = 128
REPORT_EVERY_S = 10.0


def score_command(
    model_dir: Path,
    tokens: Path,
    log: logging.Logger,
    *,
    dtype: str | None,
    mesh: str | None,
    out: Path | None,
) -> None:
    """Prints the log-probs of every line of a file, a JSON list a line, in the file's order.

    Args:
        model_dir: a Hugging Face directory.
        tokens: a JSON list of at least two token ids a line.
        log: progress.
        dtype: of activations and matrix products; by default the type of the stored weights.
        mesh: such as "fsdp=2,tensor=2"; by default fsdp over all devices.
        out: a file in place of standard output.

    Raises:
        UserError: a line that is no such list (with its number), an unreadable model or file.
    """
    config = load_config(model_dir)
    lines = read_lines(tokens, config)
    params, execution = load_model(model_dir, config, log, dtype=dtype, mesh=mesh)
    scored = score_lines(params, config, lines, execution)
    total, done, reported_at = sum(map(len, lines)), 0, time.monotonic()
    with writable(out) as stream:
        for number, (ids, logprobs) in enumerate(zip(lines, scored, strict=True), start=1):
            if not np.isfinite(logprobs).all():
                raise UserError("the model's log-probs are not finite", place=f"{tokens}:{number}")
            # Nine digits say a float32 exactly.
            stream.write("[" + ", ".join(f"{value:.9g}" for value in logprobs) + "]\n")
            done, now = done + len(ids), time.monotonic()
            if now - reported_at > REPORT_EVERY_S or number == len(lines):
                share, reported_at = 100 * done / total, now
                log.info("%d of %d lines, %.0f %% of the tokens", number, len(lines), share)


def load_model(
    model_dir: Path,
    config: ModelConfig,
    log: logging.Logger,
    *,
    dtype: str | None,
    mesh: str | None,
) -> tuple[Any, Execution]:
    """Return the weights of a Hugging Face directory on a mesh, and how to compute with them.

    Args:
        model_dir: the directory.
        config: its config.json.
        log: receives the time that loading took.
        dtype: of activations and matrix products; by default the type of the stored weights.
        mesh: such as "fsdp=2,tensor=2"; by default fsdp over all devices.

    Raises:
        UserError: the weights cannot be read, or the mesh does not fit.
    """
    grid = make_mesh(_parse_mesh(mesh))
    began = time.monotonic()
    params = load_params(model_dir, config, grid)
    log.info("loaded %s in %.1f s", model_dir, time.monotonic() - began)
    compute_dtype = jnp.dtype(dtype) if dtype else jax.tree.leaves(params)[0].dtype
    full_float32(compute_dtype)
    return params, Execution(compute_dtype, mesh=grid)


@contextmanager
def writable(out: Path | None) -> Iterator[IO[str]]:
    """Open a file for writing, or standard output.

    Raises:
        UserError: it cannot be written.
    """
    try:
        with out.open("w") if out else nullcontext(sys.stdout) as stream:
            yield stream
    except OSError as error:
        raise UserError(f"cannot write: {error.strerror}", place=str(out or "stdout")) from error


def read_lines(path: Path, config: ModelConfig) -> list[np.ndarray]:
    """Return the token ids of every line, int32 [n] each, without the text.

    Raises:
        UserError: unreadable or empty; or file:line of what is no JSON list of at least two ids of
            the vocabulary, or is longer than the model is known for.
    """
    lines: list[np.ndarray] = []
    try:
        with path.open("rb") as file:
            while text := file.readline(MAX_LINE_BYTES + 1):
                lines.append(_parse_line(text, config, f"{path}:{len(lines) + 1}"))
    except OSError as error:
        raise UserError(f"cannot read: {error.strerror}", place=str(path)) from error
    if not lines:
        raise UserError("no lines", place=str(path), remedy="write a list of token ids a line")
    return lines


def _parse_line(text: bytes, config: ModelConfig, place: str) -> np.ndarray:
    if len(text) > MAX_LINE_BYTES:
        raise UserError(f"longer than {MAX_LINE_BYTES} bytes", place=place)
    try:
        ids = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}", place=place) from error
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise UserError("not a JSON list of whole numbers", place=place)
    if len(ids) < 2:
        raise UserError(f"{len(ids)} tokens: the first has no log-prob", place=place)
    for token in (min(ids), max(ids)):
        if not 0 <= token < config.vocab_size:
            raise UserError(f"token {token} of a vocabulary of {config.vocab_size}", place=place)
    config.check_length(len(ids), place=place)
    return np.array(ids, np.int32)


def _parse_mesh(text: str | None) -> schema.Mesh:
    """A mesh such as "fsdp=2,tensor=2"; axes that are not named are 1."""
    if text is None:
        return schema.Mesh(fsdp=len(jax.devices()))
    axes = dict(part.partition("=")[::2] for part in text.split(","))
    try:
        mesh = schema.Mesh.model_validate({axis: int(size) for axis, size in axes.items()})
    except ValueError as error:
        raise UserError(
            f"{text!r} is not a mesh", place="--mesh", remedy="write it as fsdp=2,tensor=2"
        ) from error
    # Where the platform is the CPU, its devices are as many as one asks for, before the first use.
    flags, flag = os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count"
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={mesh.devices}"
        os.environ.update(xla_threads(mesh.devices))
    return mesh


def score_lines(
    params: Any, config: ModelConfig, lines: Sequence[np.ndarray], execution: Execution
) -> Iterator[np.ndarray]:
    """Log-probs, at temperature 1, of tokens 2..n of every line given those before them.

    Args:
        params: the model on `execution.mesh`.
        config: its shape.
        lines: int32 [n] each, n at least 2.
        execution: types and mesh.

    Yields:
        float32 [n - 1], in the order of the lines.
    """
    assert execution.mesh is not None
    shape, context = execution.mesh.shape, execution.mesh.shape["context"]
    shards = shape["data"] * shape["fsdp"]
    longest, total = max(map(len, lines)), sum(map(len, lines))
    multiple = ROW_MULTIPLE * context
    tokens = -(-max(longest, min(MICROBATCH_TOKENS // 4, total // shards)) // multiple) * multiple
    rows = shards * max(1, MICROBATCH_TOKENS * context // tokens)
    program = partial(token_scores, config=config, execution=execution)
    found = in_rows(program, params, execution.mesh, lines, tokens, rows, WINDOW_TOKENS)
    return (logprobs[:-1] for logprobs in found)


def in_rows(
    program: Callable[[Any, TokenBatch], Array],
    params: Any,
    mesh: Mesh,
    sequences: Iterable[np.ndarray],
    tokens: int,
    rows: int,
    together: int,
) -> Iterator[np.ndarray]:
    """Yield what a program computes at the positions of each sequence, [n, ...], in order.

    Sequences are packed into rows of one shape, so one program is compiled.

    Args:
        program: from parameters and a microbatch to values [rows, tokens, ...].
        params: the model on the mesh.
        mesh: cuts the rows.
        sequences: int32 [n] each, n at least 2.
        tokens, rows: shape of a microbatch.
        together: tokens that are packed together, and in memory at a time.
    """
    shards, left = mesh.shape["data"] * mesh.shape["fsdp"], iter(sequences)
    while some := list(_some(left, together)):
        packed = pack(
            [Sample(ids[:1], ids[1:]) for ids in some], tokens=tokens, rows=rows, shards=shards
        )
        values = [
            np.asarray(program(params, shard_batch(packed.token_batch(index), mesh)))
            for index in range(packed.microbatches)
        ]
        for ids, at in zip(some, packed.placements, strict=True):
            yield values[at.microbatch][at.row, at.start : at.start + len(ids)]


def _some(sequences: Iterator[np.ndarray], together: int) -> Iterator[np.ndarray]:
    """Yield sequences of `together` tokens, or what is left."""
    size = 0
    for ids in sequences:
        yield ids
        size += len(ids)
        if size >= together:
            return


@partial(jax.jit, static_argnames=("config", "execution"))
def token_scores(
    params: Any, batch: TokenBatch, *, config: ModelConfig, execution: Execution
) -> Float[Array, "B T"]:
    """Log-probs of the targets at temperature 1."""
    return policy_logprobs(bind(config, params), batch, execution, temperature=1.0)[0]


ROW_TOKENS = 1 << 11
"""Shortest row; many short documents share one."""
PACKED_TOKENS = 1 << 17
"""Tokens that are packed together."""


@dataclass(frozen=True)
class Window:
    """A piece of a document, as the model reads it."""

    document: tuple[int, str]
    """Number of the document, from 0, and its name."""
    ids: np.ndarray
    """i32 [n], special tokens included."""
    counted: np.ndarray
    """bool [n]: no special token."""
    characters: np.ndarray
    """i32 [n]: characters that end with each token; tokens may share one of several bytes."""


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
                yield Window((number, document.name), ids, counted, characters)
            elif piece is encoded:
                raise UserError(
                    "one token, which has no log-prob",
                    place=f"document {document.name}",
                    remedy="leave it out",
                )


def _by_document(
    program: Callable[..., Array], options: Options, log: logging.Logger
) -> Iterator[tuple[str, Iterator[tuple[Window, np.ndarray]]]]:
    """Yield the name of each document, and its windows with what a program computes of them."""
    config = load_config(options.model_dir)
    tokenizer = read_tokenizer(options.model_dir / "tokenizer.json")
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
    mesh, counts = execution.mesh, Counts()
    assert mesh is not None, "`load_model` gives one"
    multiple = ROW_MULTIPLE * mesh.shape["context"]
    tokens = -(-max(ROW_TOKENS, context) // multiple) * multiple
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    documents = read_all(options.files, counts, kind=options.kind, column=options.column)
    found, read = tee(windows(documents, tokenizer, config, context))
    bound, ids = partial(program, config=config, execution=execution), (each.ids for each in read)
    values = in_rows(bound, params, mesh, ids, tokens, rows, PACKED_TOKENS)
    grouped = groupby(zip(found, values, strict=True), lambda pair: pair[0].document)
    return ((name, pairs) for (_, name), pairs in reported(grouped, counts, log))


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

    The bits are - log2 p of its tokens, each given those before it. The first token of a window has
    no log-prob unless the tokenizer puts a special token before it.

    Args:
        options: model and files.
        out: a file in place of standard output.
        log: receives progress.

    Raises:
        UserError: the model or a file cannot be read, a log-prob is not finite, or `out` cannot be
            written.
    """
    found = _by_document(token_scores, options, log)
    with writable(out) as stream:
        stream.write("name\ttokens\tcharacters\tbits_per_character\n")
        for name, pairs in found:
            tokens, characters, nats = 0, 0, 0.0
            for window, logprobs in pairs:
                counted = window.counted[1:]
                tokens += int(counted.sum())
                characters += int(window.characters[1:].sum(where=counted))
                nats -= float(logprobs[:-1].sum(where=counted, dtype=np.float64))
            if not math.isfinite(nats):
                raise UserError("log-probs are not finite", place=f"document {name}")
            rate = nats / math.log(2) / max(characters, 1)
            stream.write(f"{name}\t{tokens}\t{characters}\t{rate:.6g}\n")


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
    found, size = _by_document(_hidden, options, log), load_config(options.model_dir).hidden_size
    written = list[str]()
    with atomic_file(out) as file:
        _write_header(file, 0, size)
        for name, pairs in found:
            total, count = np.zeros(size), 0
            for window, hidden in pairs:  # all of its tokens count
                total += hidden.sum(axis=0, dtype=np.float64)
                count += len(window.ids)
            file.write((total / count).astype(np.float32).tobytes())
            written.append(name)
        file.seek(0)
        _write_header(file, len(written), size)
    if names is not None:
        write_atomic(names, "".join(f"{name}\n" for name in written).encode())


def _write_header(file: BinaryIO, rows: int, columns: int) -> None:
    """Write numpy's header, whose length does not depend on the number of rows."""
    header = {"descr": "<f4", "fortran_order": False, "shape": (rows, columns)}
    np.lib.format.write_array_header_1_0(file, header)
