"""Scores given tokens with a model, to compare it with transformers or vLLM."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from learner_jax.leaves import load_params
from learner_jax.model import bind
from learner_jax.packing import Sample, TokenBatch, pack
from learner_jax.sharding import Execution, full_float32, make_mesh, shard_batch
from learner_jax.step import policy_logprobs
from runspec.core import schema
from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig
from runspec.core.models.family import load_config
from runspec.core.models.hardware import xla_threads

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

    Lines are packed into rows of one shape, so one program is compiled.

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
    for window in _windows(lines):
        packed = pack(
            [Sample(ids[:1], ids[1:]) for ids in window], tokens=tokens, rows=rows, shards=shards
        )
        batches = (
            shard_batch(packed.token_batch(index), execution.mesh)
            for index in range(packed.microbatches)
        )
        found = [np.asarray(_logprobs(params, batch, config, execution)) for batch in batches]
        yield from packed.gather(np.stack(found))


def _windows(lines: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
    window: list[np.ndarray] = []
    size = 0
    for ids in lines:
        window.append(ids)
        size += len(ids)
        if size >= WINDOW_TOKENS:
            yield window
            window, size = [], 0
    if window:
        yield window


@partial(jax.jit, static_argnames=("config", "execution"))
def _logprobs(
    params: Any, batch: TokenBatch, config: ModelConfig, execution: Execution
) -> Float[Array, "B T"]:
    return policy_logprobs(bind(config, params), batch, execution, temperature=1.0)[0]
