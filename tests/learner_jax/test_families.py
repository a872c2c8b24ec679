"""One decoder for all families: what transformers computes of each, packed, alone, by `score`."""

from __future__ import annotations

import json
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from bridge.weight_map import weight_map
from learner_jax import score
from learner_jax.__main__ import main
from learner_jax.decoder import rotation
from learner_jax.leaves import leaf_at, load_params
from learner_jax.logprobs import token_logprobs
from learner_jax.model import bind
from learner_jax.packing import Packed, Sample, TokenBatch, pack
from learner_jax.sharding import Execution, full_float32, make_mesh
from runspec.core import schema
from runspec.core.models import ModelConfig
from runspec.core.models.family import load_config, parse_config
from tests.learner_jax.families import (
    FAMILIES,
    LLAMA3,
    VOCABULARY,
    YARN,
    in_double,
    lines,
    saved,
    theirs,
    token_weights,
)

pytestmark = pytest.mark.slow

TOLERANCE = {"float32": 1e-5, "float64": 1e-10}
GRADIENT_TOLERANCE = {"float32": 3e-5, "float64": 1e-10}
"""In float32 either program is about 1e-5 from the gradient in float64."""


@cache
def packed() -> Packed:
    return pack([Sample(ids[:1], ids[1:]) for ids in lines()], tokens=48, rows=2)


@partial(jax.jit, static_argnames=("config", "execution"))
def ours(params: Any, batch: TokenBatch, weights: Any, config: ModelConfig, execution: Any) -> Any:
    """Gradient of the weighted log-probs, the log-probs, and the logits."""

    def objective(params: Any) -> Any:
        policy = bind(config, params)
        hidden = policy(batch.tokens, batch.segment_ids, batch.positions, execution)
        head = policy.head_weight()
        logprobs, _ = token_logprobs(
            hidden, head, batch.targets, temperature=1.0, mesh=execution.mesh
        )
        return jnp.sum(weights * logprobs), (logprobs, hidden @ head)

    return jax.grad(objective, has_aux=True)(params)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def tensors_of(tree: Any, config: ModelConfig) -> dict[str, np.ndarray]:
    """A tree by Hugging Face names."""
    found = {}
    for entry in weight_map(config):
        leaf = np.asarray(leaf_at(tree, entry.path))
        parts = [leaf] if entry.layers is None else list(leaf)
        found |= {
            name: entry.to_hf(part) for name, part in zip(entry.tensor_names(), parts, strict=True)
        }
    return found


@pytest.mark.parametrize(
    ("name", "dtype"), [("qwen2, tied", "float32"), *((name, "float64") for name in FAMILIES)]
)
def test_a_family_is_what_transformers_computes(name, dtype):
    assert_parity(name, dtype)


def assert_parity(name: str, dtype: str) -> None:
    """Of logits, log-probs and gradients with transformers, to 1e-5 or 1e-10 as the type allows."""
    # given a random model as transformers saved it, and what transformers says of samples alone
    config = load_config(saved(name))
    expected = theirs(name, dtype)
    with jax.enable_x64(dtype == "float64"):
        mesh = make_mesh(schema.Mesh())
        params = load_params(saved(name), config, mesh)
        params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
        # when the same samples are packed into rows
        grads, (found_logprobs, found_logits) = ours(
            params,
            packed().token_batch(0),
            packed().scatter(token_weights())[0].astype(dtype),
            config,
            Execution(jnp.dtype(dtype), mesh=mesh),
        )
    # then logits, log-probs and the gradient of every tensor are the same
    for number, place in enumerate(packed().placements):
        row = np.s_[place.row, place.start : place.stop]
        logits, logprobs = expected.logits[number][:-1], expected.logprobs[number]
        assert relative(np.asarray(found_logits)[row], logits) < TOLERANCE[dtype]
        assert relative(np.asarray(found_logprobs)[row], logprobs) < TOLERANCE[dtype]
    found = tensors_of(grads, config)
    assert found.keys() == expected.gradients.keys()
    errors = {key: relative(found[key], expected.gradients[key]) for key in found}
    assert max(errors.values()) < GRADIENT_TOLERANCE[dtype], errors


VARIANTS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 2.5},
    {"rope_type": "dynamic", "factor": 4.0},
    {"rope_type": "yarn", "factor": 3.0},  # its length is the model's
    {**YARN, "factor": None, "attention_factor": 1.7},  # the factor is that of the lengths
    {**YARN, "beta_fast": 5.0, "beta_slow": 0.5, "truncate": False, "mscale": 0.7},
    {**YARN, "mscale": 0.7, "mscale_all_dim": 1.3},
    {**YARN, "factor": 0.5},
    {**LLAMA3, "low_freq_factor": 0.7, "high_freq_factor": 1.1},
]


def rope_fields(rope: dict[str, Any]) -> dict[str, Any]:
    sizes = {"vocab_size": 11, "hidden_size": 12, "intermediate_size": 13, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "head_dim": 20, "max_position_embeddings": 64}
    return {"model_type": "llama", "rms_norm_eps": 1e-6, **sizes, **heads, **rope}


@pytest.mark.parametrize("parameters", VARIANTS, ids=str)
def test_a_variant_of_rope_turns_as_transformers_turns(parameters):
    # given the parameters of a variant, in the spelling of transformers 5 and in the older one
    older = {("type" if key == "rope_type" else key): value for key, value in parameters.items()}
    spellings = [
        {"rope_parameters": {**parameters, "rope_theta": 500.0}},
        {"rope_scaling": older, "rope_theta": 500.0},
    ]
    positions = np.array([[0, 1, 2, 3, 15, 16, 17, 31, 62, 63]])
    # when transformers computes cosine and sine in double
    with in_double():
        module = LlamaRotaryEmbedding(LlamaConfig(**rope_fields(spellings[0])))
        expected = module(torch.zeros(1, dtype=torch.float64), torch.tensor(positions))
    # then both spellings give the same, of which transformers keeps two copies
    for spelling in spellings:
        config = parse_config(rope_fields(spelling), place="config.json")
        with jax.enable_x64(True):
            for found, values in zip(rotation(positions, config), expected, strict=True):
                both = np.concatenate([found, found], axis=-1)[:, :, 0]
                np.testing.assert_allclose(both, values.numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("compute", "asked"), [("float32", True), ("bfloat16", False)])
def test_float32_products_are_asked_for_in_full_where_that_is_the_type(compute, asked):
    # given a process that computes in a type, when a product is lowered
    full_float32(compute)
    text = jax.jit(lambda x: x @ x).lower(jnp.zeros((2, 2), compute)).as_text()
    # then an accelerator is not left to round its operands
    assert ("HIGHEST" in text) == asked


SCORED = "llama 3"


def scored(tokens: Path, *options: str) -> int:
    """Exit code of the command."""
    return main(["score", str(saved(SCORED)), "--tokens", str(tokens), *options])


def write(path: Path, rows: list[list[int]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_log_probs_are_those_of_transformers_in_the_files_order(tmp_path, monkeypatch, capsys):
    # given many lines of few kinds, and room for a part of them at a time
    monkeypatch.setattr(score, "WINDOW_TOKENS", 1000)
    kinds = np.random.default_rng(0).integers(0, len(lines()), 200)
    tokens = write(tmp_path / "tokens.jsonl", [lines()[kind].tolist() for kind in kinds])
    # when they are scored on one device and on four
    assert scored(tokens, "--mesh", "fsdp=1") == 0
    one = capsys.readouterr().out
    assert scored(tokens, "--mesh", "fsdp=2,tensor=2", "--out", str(tmp_path / "out.jsonl")) == 0
    # then both say of each line what transformers says of its kind
    expected = theirs(SCORED, "float32").logprobs
    for text in (one, (tmp_path / "out.jsonl").read_text()):
        for kind, line in zip(kinds, text.splitlines(), strict=True):
            np.testing.assert_allclose(json.loads(line), expected[kind], rtol=1e-4, atol=1e-4)
    # and in bfloat16 one is off by that type's rounding
    one_line = write(tmp_path / "one.jsonl", [lines()[3].tolist()])
    assert scored(one_line, "--mesh", "fsdp=1", "--dtype", "bfloat16") == 0
    found = np.array(json.loads(capsys.readouterr().out))
    assert 1e-4 < np.abs(found - expected[3]).mean() / np.abs(expected[3]).mean() < 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]\n\xff\xfe\n", r":2: not JSON"),
        ("[" * 100_000 + "\n", r":1: not JSON"),
        ("[1]\n", r":1: 1 tokens: the first has no log-prob"),
        ("[1, true]\n", r":1: not a JSON list of whole numbers"),
        (f"[1, {VOCABULARY}]\n", rf":1: token {VOCABULARY} of a vocabulary of"),
        ("[-1, 1]\n", r":1: token -1 of a vocabulary"),
        ("", r": no lines"),
        (f"[1, 2]\n[{'1,' * 300_000}2]\n", r":2: longer than 500000 bytes"),
    ],
)
def test_a_line_that_cannot_be_scored_is_named(tmp_path, capfd, monkeypatch, text, message):
    # given a file with a fault in one line, when it is scored
    monkeypatch.setattr(score, "MAX_LINE_BYTES", 500_000)
    path = tmp_path / "tokens.jsonl"
    path.write_bytes(text.encode("latin-1"))
    code = scored(path)
    # then the command fails before it computes anything, and names file and line
    captured = capfd.readouterr()
    assert (code, captured.out) == (1, "")
    assert re.search(rf"tokens\.jsonl{message}", captured.err), captured.err


@pytest.mark.parametrize("mesh", ["fsdp", "fsdp=x", "rows=2"])
def test_a_mesh_that_is_none_is_refused(tmp_path, capfd, mesh):
    assert scored(write(tmp_path / "tokens.jsonl", [[1, 2]]), "--mesh", mesh) == 1
    assert f"--mesh: {mesh!r} is not a mesh" in capfd.readouterr().err
