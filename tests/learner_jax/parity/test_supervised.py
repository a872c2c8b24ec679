"""Supervised updates are those of a plain loop in torch around transformers' own model.

The loop takes each update's documents one a row, padded on the right, and nothing of ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from learner_jax.leaves import load_params
from learner_jax.optimizer import learning_rate
from learner_jax.sharding import make_mesh
from learner_jax.step import build_programs
from learner_jax.training import supervised_step
from runspec.core.models.family import load_config
from runspec.core.schema import Mesh, Optimizer, ZLoss
from tests.learner_jax.families import in_double, loaded_from
from tests.learner_jax.test_supervised import rows_of, supervised_spec

pytestmark = pytest.mark.slow

UPDATES, VOCABULARY = 50, 40
OPTIMIZER: dict[str, Any] = {
    "lr": 2e-2,
    "weight_decay": 0.1,
    "clip_norm": 0.5,
    "warmup_updates": 5,
    "schedule": "cosine",
    "decay_updates": 40,
    "final_lr": 1e-3,
}
Z_LOSS = ZLoss(kind="logsumexp", coef=1e-3)
TOLERANCE = {"float32": 1e-3, "float64": 1e-8}


def save_llama(folder: Path) -> Path:
    """A small random model, as transformers saves it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    config = LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def documents() -> list[list[np.ndarray]]:
    """Of each update: walks along a ring of tokens, so that there is something to learn."""
    draw = np.random.default_rng(0)
    return [
        [
            np.cumsum(draw.integers(1, 4, length)).astype(np.int32) % VOCABULARY
            for length in draw.integers(2, 30, 10)
        ]
        for _ in range(UPDATES)
    ]


def rate_of(optimizer: Optimizer, n: int) -> float:
    """Linear warm-up, then half a cosine."""
    if n < optimizer.warmup_updates:
        return optimizer.lr * (n + 1) / optimizer.warmup_updates
    assert optimizer.decay_updates is not None
    share = min(1.0, (n - optimizer.warmup_updates) / optimizer.decay_updates)
    height = (1 + math.cos(math.pi * share)) / 2
    return optimizer.final_lr + (optimizer.lr - optimizer.final_lr) * height


def their_losses(
    folder: Path, dtype: str, settings: Optimizer, rates: Sequence[float]
) -> list[float]:
    model, losses = loaded_from(folder, dtype), []
    optimizer = torch.optim.AdamW(
        model.parameters(),
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )
    for rate, update in zip(rates, documents(), strict=True):
        rows = [torch.tensor(document, dtype=torch.int64) for document in update]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        trained = torch.nn.utils.rnn.pad_sequence(
            [torch.ones(len(row) - 1, dtype=torch.bool) for row in rows], batch_first=True
        )
        with in_double(dtype):
            logits = model(tokens).logits[:, :-1][trained]
        nll = torch.nn.functional.cross_entropy(logits, tokens[:, 1:][trained])
        loss = nll + Z_LOSS.coef * (logits.logsumexp(-1) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        # By hand: torch's own adds 1e-6 to the norm.
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for parameter in model.parameters():
            parameter.grad.mul_((settings.clip_norm / norm).clamp(max=1.0))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "float64"])
def test_fifty_updates_are_those_of_transformers_and_torch(dtype, tmp_path):
    # given a small llama, and documents
    folder = save_llama(tmp_path / "model")
    spec = supervised_spec(
        dtype=dtype, steps=UPDATES, optimizer=OPTIMIZER, z_loss=Z_LOSS.model_dump()
    )
    # when trained on packed rows, and by torch
    found = []
    with jax.enable_x64(dtype == "float64"):
        config, mesh = load_config(folder), make_mesh(Mesh())
        schedule = learning_rate(spec.optimizer, UPDATES)
        programs = build_programs(spec, config, mesh)
        params = jax.tree.map(lambda x: x.astype(dtype), load_params(folder, config, mesh))
        state = programs.init_state(params)
        # optax computes the rate in float32, whatever the type of the weights: torch takes those
        # bits, and they are near the formula.
        rates = [
            float(rate) for rate in jax.jit(jax.vmap(schedule))(np.arange(UPDATES, dtype=np.int32))
        ]
        for update in documents():
            rows = rows_of(spec, update)
            result = supervised_step(spec, mesh, programs, state, rows)
            state = result.state
            found.append(result.numbers["loss"])
    assert rates == pytest.approx([rate_of(spec.optimizer, n) for n in range(UPDATES)], rel=1e-6)
    expected = their_losses(folder, dtype, spec.optimizer, rates)
    # then the losses are the same
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE[dtype])
