"""Adapters: the model with W + (alpha / r) A B in place of W, whoever computes it."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec
from safetensors.torch import load_file

from learner_jax.__main__ import main
from learner_jax.checkpoint import StateInfo, save_state
from learner_jax.execution import Execution
from learner_jax.export_adapter import write_adapter
from learner_jax.leaves import HostLeaves, leaf_at, load_params
from learner_jax.model import abstract_lora, abstract_params, bind, init_lora, merge_lora
from learner_jax.sharding import make_mesh, param_shardings
from learner_jax.step import TrainState
from learner_jax.warm_start import model_config
from runspec.core.errors import UserError
from runspec.core.models.config import ModelConfig
from runspec.core.models.family import load_config
from runspec.core.run_files import state_folder
from runspec.core.spec.schema import Lora, Mesh
from tests.learner_jax.conftest import Run, changed, tiny_spec, write_initial_model
from tests.learner_jax.families import in_double, lines, loaded, saved

NAME = "qwen3, head_dim is not D / H"
LORA = Lora(rank=3, alpha=5.0)
IDS = lines()[1]


@cache
def config() -> ModelConfig:
    return load_config(saved(NAME))


def base() -> Any:
    params = load_params(saved(NAME), config(), make_mesh(Mesh()))
    return jax.tree.map(lambda leaf: leaf.astype(jnp.float64), params)


def random_adapters(lora: Lora) -> Any:
    """Adapters of which no part is zero, float32."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda spec: rng.normal(scale=0.2, size=spec.shape).astype(np.float32),
        abstract_lora(config(), lora),
    )


def logits_of(*trees: Any, lora: Lora | None = None) -> jax.Array:
    tokens = jnp.asarray(IDS)[None]
    policy = bind(config(), *trees, lora=lora)
    hidden = policy(
        tokens,
        jnp.ones_like(tokens),
        jnp.arange(len(IDS))[None],
        Execution(jnp.float64),
    )
    return (hidden @ policy.head_weight())[0]


def exported(directory: Path, adapters: Any, lora: Lora) -> dict[str, torch.Tensor]:
    """The tensors of a PEFT directory, double, as leaves of torch's graph."""
    leaves = HostLeaves(jax.tree.map(jnp.asarray, adapters))
    write_adapter(directory, leaves, config(), lora=lora, base_model="some/base")
    tensors = load_file(directory / "adapter_model.safetensors")
    return {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}


def in_transformers(tensors: dict[str, torch.Tensor], lora: Lora) -> torch.Tensor:
    """Logits of transformers' model whose matrices are W + (alpha / r) B A, [out, in] all."""
    model = loaded(NAME, "float64")
    weights, scale = dict(model.named_parameters()), lora.alpha / lora.rank
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            b = tensors[name.replace("lora_A", "lora_B")]
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + scale * b @ a
    with in_double():
        tokens = torch.tensor(IDS.astype(np.int64))[None]
        return torch.func.functional_call(model, weights, (tokens,)).logits[0]


@pytest.mark.parametrize(
    "lora",
    [LORA, Lora(rank=2, alpha=1.0, targets=["o", "down"])],
    ids=["every matrix", "two of them"],
)
def test_adapters_beside_merged_and_exported_are_one_model(tmp_path: Path, lora: Lora) -> None:
    # given adapters, exported
    adapters = random_adapters(lora)
    tensors = exported(tmp_path / "adapter", adapters, lora)
    # when the model is computed with them beside the matrices, merged, and in transformers
    expected = in_transformers(tensors, lora).detach().numpy()
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), adapters)
        beside = np.asarray(logits_of(base(), wide, lora=lora))
        merged = np.asarray(logits_of(merge_lora(base(), wide, lora)))
        without = np.asarray(logits_of(base()))
    # then the logits are the same, and are not those of the base
    for found in (beside, merged):
        assert np.linalg.norm(found - expected) / np.linalg.norm(expected) < 1e-10
    assert np.linalg.norm(without - expected) / np.linalg.norm(expected) > 0.1


def test_gradients_of_adapters_are_those_of_torch(tmp_path: Path) -> None:
    # given adapters and a weight for each logit
    adapters = random_adapters(LORA)
    tensors = exported(tmp_path / "adapter", adapters, LORA)
    weights = np.random.default_rng(1).normal(size=(len(IDS), config().vocab_size))
    # when both differentiate the weighted sum by the adapters alone
    (in_transformers(tensors, LORA) * torch.tensor(weights)).sum().backward()
    with jax.enable_x64(True):
        frozen = base()

        def objective(adapters: Any) -> jax.Array:
            return jnp.sum(weights * logits_of(frozen, adapters, lora=LORA))

        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), adapters)
        grads = jax.tree.map(np.asarray, jax.grad(objective)(wide))
    # then every gradient is the same
    gradients = tmp_path / "gradients"
    ours = exported(gradients, jax.tree.map(np.float32, grads), LORA)
    for name, tensor in tensors.items():
        expected = tensor.grad
        assert expected is not None
        error = torch.linalg.norm(ours[name] - expected) / torch.linalg.norm(expected)
        assert error < 1e-6, name  # written as float32


def test_a_run_starts_at_its_base_model() -> None:
    # given fresh adapters of two seeds
    first, second = (init_lora(config(), LORA, jax.random.key(seed)) for seed in (0, 1))
    for path, leaf in HostLeaves(first).items():
        if path[-1] == "b":
            # then B is zero
            assert not leaf.any(), path
        else:
            # and A is drawn from the seed, with the variance of a uniform draw in ±1/sqrt(fan-in)
            fan_in = math.prod(leaf.shape[1:-1])
            assert float(leaf.std()) == pytest.approx((3 * fan_in) ** -0.5, rel=0.25), path
            assert (leaf != leaf_at(second, path)).any(), path
    # so that what is published is the base, in the type that was asked for
    stored = load_params(saved(NAME), config(), make_mesh(Mesh()))
    merged = merge_lora(stored, first, LORA, jnp.bfloat16)
    for path, leaf in HostLeaves(merged).items():
        wanted = leaf_at(stored, path)
        if path[-2:-1] and path[-2] in LORA.targets:
            assert leaf.dtype == jnp.bfloat16
            wanted = wanted.astype(jnp.bfloat16)
        np.testing.assert_array_equal(leaf, wanted, err_msg=str(path))


def test_adapters_are_cut_as_their_matrices_are() -> None:
    # given a mesh that cuts what it can
    mesh = make_mesh(Mesh(fsdp=2, tensor=2))
    whole = param_shardings(abstract_params(config()), mesh)["layers"]["attention"]
    # when the adapters are laid on it
    adapters = param_shardings(abstract_lora(config(), LORA), mesh)["layers"]["attention"]
    # then inputs are cut in A as in W, outputs in B, the rank never
    for target, inputs in (("q", 1), ("k", 1), ("o", 2)):
        cut = whole[target]["weight"].spec
        a, b = adapters[target]["a"].spec, adapters[target]["b"].spec
        assert a == PartitionSpec(*cut[: 1 + inputs], None)
        assert b == PartitionSpec(cut[0], None, *cut[1 + inputs :])


def test_the_directory_is_pefts(tmp_path: Path) -> None:
    # given exported adapters
    tensors = exported(tmp_path / "adapter", random_adapters(LORA), LORA)
    # then names and shapes are PEFT's
    prefix = "base_model.model.model.layers.2."
    sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    assert sizes[f"{prefix}self_attn.q_proj.lora_A.weight"] == (3, 30)
    assert sizes[f"{prefix}self_attn.q_proj.lora_B.weight"] == (48, 3)
    assert sizes[f"{prefix}self_attn.o_proj.lora_A.weight"] == (3, 48)
    assert sizes[f"{prefix}mlp.down_proj.lora_B.weight"] == (30, 3)
    assert len(sizes) == 3 * 7 * 2
    # and so is what it says of itself
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (said["peft_type"], said["r"], said["lora_alpha"]) == ("LORA", 3, 5.0)
    assert said["base_model_name_or_path"] == "some/base"
    assert said["target_modules"] == sorted(
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    )
    with pytest.raises(UserError, match="exists already"):
        exported(tmp_path / "adapter", random_adapters(LORA), LORA)


def test_a_run_exports_the_adapters_of_a_full_state(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # given a run that trains adapters, and its full state after two steps
    lora = Lora(rank=2, alpha=4.0, targets=["q", "down"])
    spec = changed(tiny_spec(), learner={"lora": lora})
    run = Run(tmp_path / "run", spec)
    write_initial_model(run)
    adapters = jax.tree.map(
        lambda leaf: leaf + 1, init_lora(model_config(spec), lora, jax.random.key(0))
    )
    number = jnp.zeros((), jnp.int32)
    state = TrainState(adapters, {"not": adapters}, number)
    info = StateInfo(2, None, spec.seed, "0" * 64, True, {})
    save_state(state_folder(run.path, spec), info, state, keep=1)()
    # when they are exported
    out = tmp_path / "adapter"
    assert main(["export-adapter", str(run.path), str(out)]) == 0
    # then the directory holds them, and a step of which there is no state is named
    tensors = load_file(out / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    np.testing.assert_array_equal(
        tensors[name], np.asarray(adapters["layers"]["mlp"]["down"]["a"][1]).T
    )
    assert len(tensors) == 2 * 2 * 2
    assert main(["export-adapter", str(run.path), str(tmp_path / "b"), "--step", "1"]) == 1
    assert "no full state of step 1; there are: 2" in capfd.readouterr().err
