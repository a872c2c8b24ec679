"""Qwen2 models of several sizes, trained for a minute on real text, and their hidden states.

The text is the source of Python's standard library, a token a byte: there on every machine, and
far from random. Final hidden states come in float32 or bfloat16 arithmetic, rounded to bf16.
"""

from __future__ import annotations

import itertools
import json
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from learner_jax.leaves import save_weights
from learner_jax.logprobs import token_logprobs
from learner_jax.model import bind, init_params
from learner_jax.optimizer import apply_gradients, build_optimizer, init_state
from learner_jax.sharding import Execution
from runspec.core.models import ModelConfig
from runspec.core.models.family import hf_config, parse_config
from runspec.core.schema import Optimizer
from verify.toploc import CHUNK_ROWS

SEQUENCE = 256
PROMPT = CHUNK_ROWS  # tokens of a sequence that are no output
CHUNKS_A_SEQUENCE = (SEQUENCE - PROMPT) // CHUNK_ROWS
_TRAINING_SHARE = 0.2


@dataclass(frozen=True)
class Size:
    """A model to train."""

    hidden: int
    layers: int
    updates: int
    sequences: int
    """Of a batch, 256 bytes each."""
    lr: float

    @property
    def config(self) -> ModelConfig:
        fields = {
            "model_type": "qwen2",
            "vocab_size": 256,
            "hidden_size": self.hidden,
            "intermediate_size": self.hidden * 8 // 3 // 16 * 16,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.hidden // 32,
            "num_key_value_heads": max(1, self.hidden // 64),
            "head_dim": 32,
            "max_position_embeddings": 2 * SEQUENCE,
            "rope_theta": 10000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "sliding_window": None,
        }
        return parse_config(fields, place="benchmarks.null")


def read_text() -> np.ndarray:
    """u8: the sources one after another, in order of their names."""
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = [p for p in sorted(root.rglob("*.py")) if "site-packages" not in p.parts]
    return np.frombuffer(b"\n".join(path.read_bytes() for path in paths), np.uint8)


def windows(text: np.ndarray, first: int, count: int) -> np.ndarray:
    """i32 [count, 256]: of the windows that do not overlap, in a fixed random order, from `first`.

    Of the part that nothing trains on. A random order makes those from anywhere on a sample drawn
    without replacement, whatever the text.
    """
    kept = text[int(_TRAINING_SHARE * len(text)) :]
    order = np.random.default_rng(0).permutation(len(kept) // SEQUENCE)
    if first + count > len(order):
        raise ValueError(f"the text has {len(order)} windows, not {first + count}")
    starts = order[first : first + count, None] * SEQUENCE
    return kept[starts + np.arange(SEQUENCE)].astype(np.int32)


def held_out(text: np.ndarray, count: int) -> np.ndarray:
    """i32 [count, 256]: windows that do not overlap, of the part that nothing trains on."""
    kept = text[int(_TRAINING_SHARE * len(text)) :]
    starts = np.linspace(0, len(kept) - SEQUENCE, count).astype(int)
    if count > 1 and np.diff(starts).min() < SEQUENCE:
        raise ValueError(f"the text is too short for {count} windows")
    return np.stack([kept[s : s + SEQUENCE] for s in starts]).astype(np.int32)


def train(size: Size, text: np.ndarray, seed: int = 0) -> tuple[Any, Any, float]:
    """Parameters, those of 0.9 of the updates (an older checkpoint), and the last loss, nats."""
    part = text[: int(_TRAINING_SHARE * len(text))]
    params = init_params(size.config, jax.random.key(seed))
    older, last = params, jnp.nan
    steps = updates(size, params, part, np.random.default_rng(seed))
    for n, (newer, value) in enumerate(itertools.islice(steps, size.updates)):
        if n == int(0.9 * size.updates):
            older = params
        params, last = newer, value
    return params, older, float(last)


def trained(size: Size, text: np.ndarray, directory: Path | None = None) -> tuple[Any, Any, float]:
    """`train`, or what an earlier call left in the directory; None keeps nothing."""
    if directory is None:
        return train(size, text)
    path = directory / f"weights-{'-'.join(map(str, vars(size).values()))}.npz"
    shapes = jax.eval_shape(lambda: init_params(size.config, jax.random.key(0)))
    kinds = jax.tree.structure((shapes, shapes))
    if not path.exists():
        params, older, loss = train(size, text)
        leaves = map(np.asarray, jax.tree.leaves((params, older)))
        unfinished = path.with_suffix(".part.npz")
        np.savez(unfinished, *leaves, loss=loss)
        unfinished.rename(path)
    with np.load(path, allow_pickle=False) as kept:
        found = [jnp.asarray(kept[f"arr_{n}"]) for n in range(kinds.num_leaves)]
        params, older = jax.tree.unflatten(kinds, found)
        return params, older, float(kept["loss"])


def updates(
    size: Size, params: Any, text: np.ndarray, rng: np.random.Generator, lr: float | None = None
) -> Iterator[tuple[Any, jax.Array]]:
    """AdamW on windows of the text, without end: parameters after each update, the loss before it.

    Args:
        size: of the model.
        params: to start from; Adam's moments start from zero.
        text: u8, all of it is trained on.
        rng: draws the windows.
        lr: learning rate; None for the size's own.
    """
    optimizer, step = _update(size.config, size.lr if lr is None else lr, size.updates)
    state = init_state(optimizer, params)
    while True:
        starts = rng.integers(0, len(text) - SEQUENCE, size.sequences)
        tokens = np.stack([text[s : s + SEQUENCE] for s in starts]).astype(np.int32)
        params, state, value = step(params, state, jnp.asarray(tokens))
        yield params, value


@cache
def _update(config: ModelConfig, lr: float, updates: int) -> tuple[Any, Callable[..., tuple]]:
    """The optimizer, and compiled: parameters, its state, i32 [B, 256] -> parameters, its state,
    loss."""
    settings = Optimizer(lr=lr, betas=(0.9, 0.98), clip_norm=1.0, warmup_updates=10)
    optimizer = build_optimizer(settings, updates)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        hidden = _forward(params, config, tokens, jnp.float32)
        targets = jnp.concatenate([tokens[:, 1:], jnp.full((len(tokens), 1), -1)], axis=1)
        logprobs = token_logprobs(
            hidden, bind(config, params).head_weight(), targets, temperature=1.0
        )[0]
        return -jnp.sum(logprobs) / jnp.sum(targets >= 0)

    @partial(jax.jit, donate_argnums=1)
    def step(params: Any, state: Any, tokens: jax.Array) -> tuple:
        value, grads = jax.value_and_grad(loss)(params, tokens)
        return *apply_gradients(optimizer, params, state, grads), value

    return optimizer, step


def hidden_states(
    params: Any, size: Size, tokens: np.ndarray, *, dtype: Any = jnp.float32, rows: int = 16
) -> np.ndarray:
    """u16 [n, 224, D]: bf16 bits of the output positions, computed `rows` sequences at a time."""
    forward = _states(size.config, dtype)
    if dtype == jnp.bfloat16:
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    found = []
    for start in range(0, len(tokens), rows):
        batch = tokens[start : start + rows]
        padded = np.concatenate([batch, np.zeros((rows - len(batch), SEQUENCE), np.int32)])
        states = np.asarray(forward(params, jnp.asarray(padded)))[: len(batch), PROMPT:]
        found.append(states.astype(ml_dtypes.bfloat16).view(np.uint16))
    return np.concatenate(found)


@cache
def _states(config: ModelConfig, dtype: Any) -> Callable[..., jax.Array]:
    return jax.jit(lambda params, tokens: _forward(params, config, tokens, dtype))


def transformers_model(params: Any, config: ModelConfig, dtype: str) -> Any:
    """The model as `transformers` has it in torch."""
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        save_weights(params, config, directory)
        fields = hf_config(config, dtype="float32", eos_token_id=0, pad_token_id=0)
        (directory / "config.json").write_text(json.dumps(fields))
        return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))


def transformers_states(params: Any, size: Size, tokens: np.ndarray, dtype: str) -> np.ndarray:
    """u16 [n, 224, D] as `transformers` computes them in torch, four sequences at a time."""
    import torch

    model = transformers_model(params, size.config, dtype).model
    found = []
    with torch.no_grad():
        for start in range(0, len(tokens), 4):
            batch = torch.from_numpy(tokens[start : start + 4].astype(np.int64))
            states = model(input_ids=batch).last_hidden_state[:, PROMPT:]
            found.append(states.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16))
    return np.concatenate(found)


def rollouts(model: Any, prompts: np.ndarray, seed: int) -> np.ndarray:
    """What a model of `transformers` samples at temperature 1, at its first 256 positions.

    Args:
        model: with a head, in torch.
        prompts: i32 [n, prompt].
        seed: of the noise: token = argmax(logits + Gumbel noise).

    Returns:
        i32 [n, 256]: prompts and outputs.
    """
    import torch

    rng = np.random.default_rng(seed)
    tokens, past = torch.from_numpy(prompts.astype(np.int64)), None
    found = [tokens]
    with torch.no_grad():
        for _ in range(SEQUENCE - prompts.shape[1]):
            out = model(input_ids=tokens, past_key_values=past, use_cache=True, logits_to_keep=1)
            logits, past = out.logits[:, -1].float(), out.past_key_values
            noise = rng.gumbel(size=tuple(logits.shape)).astype(np.float32)
            tokens = (logits + torch.from_numpy(noise)).argmax(dim=1, keepdim=True)
            found.append(tokens)
    return torch.cat(found, dim=1).numpy().astype(np.int32)


def with_outliers(params: Any, channels: int, factor: float) -> Any:
    """The model with some channels of its final norm scaled up: crafted, as large models have."""
    scale = np.ones(params["final_norm"]["weight"].shape, np.float32)
    scale[np.linspace(0, len(scale) - 1, channels).astype(int)] = factor
    return {**params, "final_norm": {"weight": params["final_norm"]["weight"] * scale}}


def rounded_weights(params: Any, kind: str) -> Any:
    """Every matrix rounded to `fp8` (e4m3), `int8` or `int4`, with a scale an output column."""

    def rounded(leaf: jax.Array) -> jax.Array:
        if leaf.ndim < 2 or min(leaf.shape) < 2:
            return leaf
        peak = jnp.max(jnp.abs(leaf), axis=-2, keepdims=True) + 1e-12
        if kind in ("int8", "int4"):
            most = 127 if kind == "int8" else 7
            return jnp.round(leaf / peak * most) * peak / most
        return (leaf / peak * 448).astype(jnp.float8_e4m3fn).astype(leaf.dtype) * peak / 448

    return jax.tree.map(rounded, params)


def _forward(params: Any, config: ModelConfig, tokens: jax.Array, dtype: Any) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    ones = jnp.ones_like(tokens)
    return bind(config, params)(tokens, ones, positions, Execution(dtype))
