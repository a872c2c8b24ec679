"""A leased policy version and the weights that an attacker may use in its place.

The models are those of `benchmarks.null.text_model`, a token a byte; an empty line is one token,
the end token, so that outputs have ends. After the training come updates at a thirtieth of its
learning rate, a version each: what is leased is one of them. All are published in bfloat16.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.null.text_model import Size, read_text, rounded_weights, updates
from learner_jax.leaves import load_params
from learner_jax.model import init_params
from learner_jax.sharding import make_mesh
from runspec.core.models import ModelConfig
from runspec.core.models.family import load_config
from runspec.core.schema import Mesh
from runspec.core.tokenizer_files import read_tokenizer

END = 0
PROMPT = 32
_TRAINED, _OTHER = 0.2, 0.4
"""Shares of the text: the first is trained on, up to the second the fine-tuning, prompts beyond."""
_SLOWER = 30.0
BEHIND = (1, 2, 3, 5, 7, 10, 20, 40)
AHEAD = (2, 10)
TUNED = (5, 30)
SIZES = {
    "64": Size(64, 2, 240, 16, 3e-3),
    "128": Size(128, 3, 150, 8, 2e-3),
    "256": Size(256, 4, 90, 6, 1.5e-3),
}


@dataclass(frozen=True)
class Weights:
    """Of one model, as published."""

    config: ModelConfig
    params: Any
    fp8_cache: bool = False
    """Whether its engine rounds keys and values to e4m3."""


@dataclass(frozen=True)
class Policies:
    """The leased version, others by name, and the loss that the training reached."""

    leased: Weights
    others: dict[str, Weights]
    loss: float | None
    """Nats a byte; None of a model that others trained."""


def text_with_ends() -> np.ndarray:
    """u8: Python's standard library, each empty line an end token."""
    return np.frombuffer(read_text().tobytes().replace(b"\n\n", bytes([END])), np.uint8)


def prompts_of(text: np.ndarray, count: int) -> np.ndarray:
    """i32 [count, 32]: of the part that nothing trains on."""
    kept = text[int(_OTHER * len(text)) :]
    starts = np.random.default_rng(0).integers(0, len(kept) - PROMPT, count)
    return np.stack([kept[s : s + PROMPT] for s in starts]).astype(np.int32)


def train_policies(size: Size, text: np.ndarray) -> Policies:
    """Trains a size, its versions, another run, a smaller model, and tunes on other text."""
    part = text[: int(_TRAINED * len(text))]
    start, loss = _trained(size, part, seed=0)
    newest = max(BEHIND) + max(AHEAD)
    versions = [start, *_following(size, start, part, newest)]
    now = max(BEHIND)
    leased = versions[now]
    tuned = _following(size, leased, text[len(part) : int(_OTHER * len(text))], max(TUNED))
    half = replace(size, hidden=max(32, size.hidden // 2), layers=1, updates=size.updates // 2)
    named: dict[str, Any] = {
        **{f"{n} updates older": versions[now - n] for n in BEHIND},
        **{f"{n} updates newer": versions[now + n] for n in AHEAD},
        "another run": _trained(replace(size, updates=size.updates // 2), part, seed=1)[0],
        **{f"fine-tuned, {n} updates": tuned[n - 1] for n in TUNED},
        **{f"{kind} weights": rounded_weights(leased, kind) for kind in ("int8", "fp8", "int4")},
    }
    others = {name: Weights(size.config, _published(params)) for name, params in named.items()}
    others["fp8 cache"] = Weights(size.config, _published(leased), fp8_cache=True)
    others["smaller model"] = Weights(half.config, _published(_trained(half, part, seed=2)[0]))
    return Policies(Weights(size.config, _published(leased)), others, loss)


def pretrained_policies(directory: Path, versions: Sequence[Path]) -> Policies:
    """Of a Hugging Face directory whose end token is 0; `versions` are of a run that trained it."""
    config, mesh = load_config(directory), make_mesh(Mesh(fsdp=1))
    leased = load_params(directory, config, mesh)
    named = {f"{kind} weights": rounded_weights(leased, kind) for kind in ("int8", "fp8", "int4")}
    named |= {f"{path.name} of a run": load_params(path, config, mesh) for path in versions}
    others = {name: Weights(config, _published(params)) for name, params in named.items()}
    others["fp8 cache"] = Weights(config, _published(leased), fp8_cache=True)
    return Policies(Weights(config, _published(leased)), others, None)


def pretrained_prompts(directory: Path, text: np.ndarray, count: int) -> np.ndarray:
    """i32 [count, 32]: of the text, by the model's tokenizer."""
    tokenizer = read_tokenizer(directory / "tokenizer.json")
    ids = tokenizer.encode(text[: 16 * PROMPT * count].tobytes().decode("utf-8", "replace")).ids
    return np.array(ids[: PROMPT * count], np.int32).reshape(count, PROMPT)


def _trained(size: Size, text: np.ndarray, seed: int) -> tuple[Any, float]:
    params, losses = init_params(size.config, jax.random.key(seed)), []
    steps = updates(size, params, text, np.random.default_rng(seed))
    for newer, value in itertools.islice(steps, size.updates):
        params = newer
        losses.append(value)
    loss = float(jnp.mean(jnp.stack(losses[-20:])))
    print(f"hidden {size.hidden}: trained to {loss:.2f} nats", file=sys.stderr, flush=True)
    return params, loss


def _following(size: Size, params: Any, text: np.ndarray, count: int) -> list[Any]:
    """Versions after each of so many small updates."""
    steps = updates(size, params, text, np.random.default_rng(3), lr=size.lr / _SLOWER)
    return [params for params, _ in itertools.islice(steps, count)]


def _published(params: Any) -> Any:
    """Rounded to bfloat16, in float32: what validator and samplers both start from."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
