"""Supervised updates are those of a plain loop in torch around transformers' own model.

The loop takes each update's documents one a row, padded on the right, and nothing of ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from learner_jax.execution import Execution
from learner_jax.leaves import load_params
from learner_jax.model import bind
from learner_jax.optimizer import learning_rate
from learner_jax.sharding import make_mesh
from learner_jax.step import build_programs
from learner_jax.supervised import supervised_step
from runspec.core.models.family import load_config
from runspec.core.spec.schema import Mesh, Optimizer, ZLoss
from tests.learner_jax.document_rows import rows_of, supervised_spec
from tests.learner_jax.families import in_double

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


def save_llama(folder: Path, **sizes: int) -> Path:
    """A random model, as transformers saves it."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, max_position_embeddings=64, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def load_llama(folder: Path, dtype: str) -> Any:
    """transformers' own model, to be called in `in_double`."""
    stored = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with in_double(dtype):  # RoPE's frequencies are computed here
        model = AutoModelForCausalLM.from_config(
            stored.config, dtype=getattr(torch, dtype), attn_implementation="eager"
        )
    model.load_state_dict(stored.state_dict())
    return model


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
    model, losses = load_llama(folder, dtype), []
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
def test_fifty_updates_are_those_of_transformers_and_torch(dtype: str, tmp_path: Path) -> None:
    # given a small llama, and documents
    folder = save_llama(
        tmp_path / "model",
        hidden_size=24,
        intermediate_size=36,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
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


def test_logits_of_six_layers_are_those_of_transformers(tmp_path: Path) -> None:
    # given the shape of a small pretraining run
    folder = save_llama(
        tmp_path / "model",
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    packed = rows_of(supervised_spec(), documents()[0]).batch
    config = load_config(folder)
    # when a row of packed documents is computed, and each of them by transformers
    policy = bind(config, load_params(folder, config, make_mesh(Mesh())))
    batch = jax.tree.map(lambda x: x[:1], packed)
    hidden = policy(batch.tokens, batch.segment_ids, batch.positions, Execution(jnp.float32))
    logits = np.asarray(hidden @ policy.head_weight())[0]
    model = load_llama(folder, "float32")
    # then the logits are the same
    for number in range(1, int(batch.segment_ids.max()) + 1):
        own = batch.segment_ids[0] == number
        tokens = torch.tensor(batch.tokens[0, own].astype(np.int64))
        expected = model(tokens[None]).logits[0].detach().numpy()
        assert np.linalg.norm(logits[own] - expected) < 1e-5 * np.linalg.norm(expected)
