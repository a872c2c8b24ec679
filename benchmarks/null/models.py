"""The models of the null test: those trained here, and a pretrained one of a directory.

Each reads windows of 256 tokens of Python's standard library, in a fixed random order, or its own
rollouts from prompts there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from benchmarks.null.text_model import (
    PROMPT,
    SEQUENCE,
    Size,
    hidden_states,
    rollouts,
    rounded_weights,
    trained,
    transformers_model,
    transformers_states,
    windows,
    with_outliers,
)
from runspec.core.canonical import hash_parts
from verify.thresholds import BFLOAT16, FLOAT32, Limits

Pair = tuple[str, np.ndarray, np.ndarray, Limits]
"""Sampler and validator by name, the validator's states, the sampler's, and limits."""
_BYTES_A_WINDOW = 2048  # more than 256 tokens of any text but blanks


@dataclass(frozen=True)
class Model:
    """Real hidden states of one model."""

    name: str
    hidden: int
    layers: int
    loss: float | None
    """Nats a token after training; None where it was trained elsewhere."""
    windows: Callable[[int, int], np.ndarray]
    """First and count -> i32 [count, 256]."""
    states: Callable[[np.ndarray], np.ndarray]
    """Tokens -> u16 [count, 224, D]: final hidden states of the output positions, bf16 bits."""
    pairs: Callable[[np.ndarray], Iterator[Pair]]
    """Tokens -> two sides' states. Pairs named after int8 or an older checkpoint are not honest."""
    source: bytes
    """Digest of what windows and states follow from: the size or the configuration, the text."""


def text_model(
    name: str, size: Size, text: np.ndarray, cache: Path | None, *, outliers: int, sampled: bool
) -> Model:
    """One trained here, with so many channels of its final norm scaled by 8.

    It reads held-out text or, `sampled`, its own rollouts from the first 32 tokens of it.
    """
    params, older, loss = trained(size, text, cache)
    if outliers:
        params, older = (with_outliers(each, outliers, 8.0) for each in (params, older))
    engine = transformers_model(params, size.config, "float32") if sampled else None

    def outputs(first: int, count: int) -> np.ndarray:
        return rollouts(engine, windows(text, first, count)[:, :PROMPT], first)

    return Model(
        f"{name}-sampled" if sampled else name,
        size.hidden,
        size.layers,
        round(loss, 3),
        outputs if sampled else partial(windows, text),
        partial(hidden_states, params, size),
        partial(_pairs, params, older, size),
        hash_parts(repr((size, outliers, sampled)), text.tobytes()),
    )


def pretrained(directory: Path, text: np.ndarray) -> Model:
    """Of a directory that `transformers` loads without a network, with its tokenizer.

    The states are those of bfloat16 arithmetic in torch.
    """
    import torch
    from transformers import AutoModel, AutoTokenizer

    load = partial(AutoModel.from_pretrained, directory, local_files_only=True)
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    model = load(dtype=torch.bfloat16)
    order = np.random.default_rng(0).permutation(len(text) // _BYTES_A_WINDOW)

    def tokens(first: int, count: int) -> np.ndarray:
        found = []
        for slot in order[first : first + count] * _BYTES_A_WINDOW:
            words = text[slot : slot + _BYTES_A_WINDOW].tobytes().decode("utf-8", "replace")
            found.append(np.resize(tokenizer(words)["input_ids"], SEQUENCE))
        return np.array(found, np.int32)

    def pairs(some: np.ndarray) -> Iterator[Pair]:
        full = load(dtype=torch.float32)
        plain = load(dtype=torch.bfloat16, attn_implementation="eager")
        one, half = _torch_states(full, some, 8), _torch_states(model, some, 8)
        yield "float32 / float32, another batch", one, _torch_states(full, some, 3), FLOAT32
        yield "bfloat16 / float32", one, half, BFLOAT16
        yield "bfloat16 / bfloat16, another batch", half, _torch_states(model, some, 3), BFLOAT16
        yield "bfloat16 eager / bfloat16 sdpa", half, _torch_states(plain, some, 8), BFLOAT16

    return Model(
        directory.name,
        model.config.hidden_size,
        model.config.num_hidden_layers,
        None,
        tokens,
        partial(_torch_states, model, rows=8),
        pairs,
        hash_parts(str(directory.resolve()), model.config.to_json_string(), text.tobytes()),
    )


def _torch_states(model: Any, tokens: np.ndarray, rows: int) -> np.ndarray:
    import torch

    found = []
    with torch.no_grad():
        for start in range(0, len(tokens), rows):
            batch = torch.from_numpy(tokens[start : start + rows].astype(np.int64))
            states = model(input_ids=batch).last_hidden_state[:, PROMPT:]
            found.append(states.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16))
    return np.concatenate(found)


def _pairs(params: Any, older: Any, size: Size, tokens: np.ndarray) -> Iterator[Pair]:
    def states(weights: Any = params, dtype: Any = jnp.float32, rows: int = 16) -> np.ndarray:
        return hidden_states(weights, size, tokens, dtype=dtype, rows=rows)

    full, half = states(), states(dtype=jnp.bfloat16)
    yield "float32 / float32, another batch", full, states(rows=3), FLOAT32
    yield "bfloat16 / float32", full, half, BFLOAT16
    yield "float32 / bfloat16", half, full, BFLOAT16
    yield "bfloat16 / bfloat16, another batch", half, states(dtype=jnp.bfloat16, rows=3), BFLOAT16
    theirs = partial(transformers_states, params, size, tokens)
    yield "transformers float32 / float32", full, theirs("float32"), FLOAT32
    yield "transformers bfloat16 / float32", full, theirs("bfloat16"), BFLOAT16
    yield "transformers bfloat16 / bfloat16", half, theirs("bfloat16"), BFLOAT16
    fp8 = rounded_weights(params, "fp8")
    yield "fp8 weights, bfloat16 / float32", full, states(fp8, jnp.bfloat16), BFLOAT16
    yield "int8 weights / float32", full, states(rounded_weights(params, "int8")), BFLOAT16
    yield "older checkpoint / float32", full, states(older), BFLOAT16
