"""The decoder and its adapters: tables, initial values, W + (alpha / r) A B in place of W.

Its numbers are held against transformers in test_families.
"""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.sharding import PartitionSpec
from safetensors.torch import load_file

from bridge.weight_map import weight_map
from learner_jax import model
from learner_jax.__main__ import main
from learner_jax.checkpoint import StateInfo, save_state
from learner_jax.full_states import write_adapter
from learner_jax.leaves import HostLeaves, leaf_at, load_params
from learner_jax.model import (
    abstract_lora,
    abstract_params,
    bind,
    init_lora,
    init_params,
    merge_lora,
)
from learner_jax.sharding import Execution, make_mesh, param_shardings
from learner_jax.step import TrainState
from learner_jax.warm_start import model_config
from runspec.core.errors import UserError
from runspec.core.models import ModelConfig
from runspec.core.models.family import hf_config, load_config, parse_config
from runspec.core.models.family import model_config as estimated_config
from runspec.core.models.parameters import parameters, trained_parameters
from runspec.core.run_files import state_folder
from runspec.core.schema import Lora, Mesh
from tests.learner_jax.conftest import Run, changed, tiny_spec, write_initial_model
from tests.learner_jax.families import in_double, lines, loaded, saved

pytestmark = pytest.mark.slow


def test_initial_parameters_have_the_scales_of_the_recipe():
    # given a model large enough to measure a scale
    config = ModelConfig("qwen2", 300, 64, 100, 2, 4, 2, 16, 64, 1e4, 1e-6, False, True)
    params = init_params(config, jax.random.key(0))
    # then each scale is as said
    expected = {"q": 64**-0.5, "gate": 64**-0.5, "o": 0.1 * 64**-0.5, "down": 0.1 * 100**-0.5}
    for name, std in expected.items():
        part = params["layers"]["attention" if name in "qo" else "mlp"][name]
        assert float(part["weight"].std()) == pytest.approx(std, rel=0.05), name
    assert float(params["embed"].std()) == pytest.approx(1 / 8, rel=0.05)
    assert not params["layers"]["attention"]["q"]["bias"].any()
    assert (params["final_norm"]["weight"] == 1).all()


def test_a_large_model_is_drawn_in_parts_that_no_device_has_to_hold(monkeypatch):
    # given METAGENE-1, of which no draw may be larger than JAX can number
    config = ModelConfig(
        "llama", 1024, 4096, 11008, 32, 32, 32, 128, 512, 1e4, 1e-5, False, False, False, False
    )
    shapes = [leaf.shape for leaf in jax.tree.leaves(abstract_params(config))]
    drawn = [sum(prod(part) for _, part in draw) for draw in model._draws(shapes)]
    assert sum(drawn) == sum(map(prod, shapes)) > 2**32 and max(drawn) <= 2**28
    # and a small model, cut up as a large one is
    key, small = (
        jax.random.key(0),
        ModelConfig("qwen2", 300, 64, 100, 2, 4, 2, 16, 64, 1e4, 1e-6, False, True),
    )
    monkeypatch.setattr(model, "MOST_DRAWN", 5000)
    params = model.draw(abstract_params(small), key)
    # then its parts are of one distribution, and none is another's
    values = np.abs(np.ravel(params["layers"]["mlp"]["up"]["weight"]))
    assert len(np.unique(values)) > 0.99 * len(values)
    assert values.std() == pytest.approx(64**-0.5 * (1 - 2 / np.pi) ** 0.5, rel=0.05)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_the_module_is_as_its_table_says(family):
    for tied, qkv_bias, output_bias, qk_norm in product([False, True], repeat=4):
        # given a config of every combination of flags, in sizes that all differ
        config = ModelConfig(
            family, 11, 12, 13, 2, 6, 3, 8, 64, 1e4, 1e-6, tied, qkv_bias, output_bias, qk_norm
        )
        # then shapes, logical axes and initial values are those of the table, of adapters too
        assert abstract_params(config) == parameters(config)
        lora = Lora(rank=5)
        assert abstract_lora(config, lora) == trained_parameters(config, lora)
        # and the weight map has every leaf once
        leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config))
        entries = {entry.path: entry.leaf_shape for entry in weight_map(config)}
        assert entries == {tuple(key.key for key in path): leaf.shape for path, leaf in leaves}


@pytest.mark.parametrize(("head_dim", "expected"), [(6, 6), (None, 16 // 2)])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama", "mistral"])
def test_a_shape_of_every_family_is_a_model_of_it(family, head_dim, expected):
    # given a spec whose model is a shape, with heads of a size of their own, or none
    model = tiny_spec().model.model_dump(mode="json")
    model["shape"] |= {"model_type": family, "head_dim": head_dim}
    spec = tiny_spec(model=model)
    config = model_config(spec)
    # then its config is that of the estimate, has the family's biases and norms, no window, and a
    # config.json that is read back, whatever transformers would take for a missing head_dim
    assert estimated_config(spec) == config
    assert (config.qkv_bias, config.qk_norm) == (family == "qwen2", family == "qwen3")
    assert (config.head_dim, config.exact_length) == (expected, None)
    written = hf_config(config, dtype="float32", eos_token_id=1, pad_token_id=0)
    assert parse_config(written, place="config.json") == config


NAME = "qwen3, head_dim is not D / H"
LORA = Lora(rank=3, alpha=5.0)
IDS = lines()[1]


@cache
def config() -> ModelConfig:
    return load_config(saved(NAME))


def random_adapters(lora: Lora) -> Any:
    """Adapters of which no part is zero, float32."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda spec: rng.normal(scale=0.2, size=spec.shape).astype(np.float32),
        abstract_lora(config(), lora),
    )


def logits_of(*trees: Any, lora: Lora | None = None) -> jax.Array:
    tokens = jnp.asarray(IDS)[None]
    positions = jnp.arange(len(IDS))[None]

    @jax.jit
    def computed(trees: tuple[Any, ...]) -> jax.Array:
        policy = bind(config(), *trees, lora=lora)
        hidden = policy(tokens, jnp.ones_like(tokens), positions, Execution(jnp.float64))
        return (hidden @ policy.head_weight())[0]

    return computed(trees)


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
def test_adapters_beside_merged_and_exported_are_one_model(tmp_path, lora):
    # given adapters, exported, and a weight for each logit
    adapters = random_adapters(lora)
    tensors = exported(tmp_path / "adapter", adapters, lora)
    weights = np.random.default_rng(1).normal(size=(len(IDS), config().vocab_size))
    # when the model is computed with them beside the matrices, merged, and in transformers
    theirs = in_transformers(tensors, lora)
    with jax.enable_x64(True):
        base = jax.tree.map(
            lambda leaf: leaf.astype(jnp.float64),
            load_params(saved(NAME), config(), make_mesh(Mesh())),
        )
        wide = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float64), adapters)

        def objective(adapters: Any) -> tuple[jax.Array, jax.Array]:
            logits = logits_of(base, adapters, lora=lora)
            return jnp.sum(weights * logits), logits

        found = jax.grad(objective, has_aux=True)(wide)
        found += logits_of(merge_lora(base, wide, lora)), logits_of(base)
    grads, beside, merged, without = jax.device_get(found)
    # then the logits are the same, and are not those of the base
    expected = theirs.detach().numpy()
    for logits in (beside, merged):
        assert np.linalg.norm(logits - expected) / np.linalg.norm(expected) < 1e-10
    assert np.linalg.norm(without - expected) / np.linalg.norm(expected) > 0.1
    # and the gradients of the weighted sum by the adapters are torch's
    (theirs * torch.tensor(weights)).sum().backward()
    ours = exported(tmp_path / "gradients", jax.tree.map(np.float32, grads), lora)
    for name, tensor in tensors.items():
        assert tensor.grad is not None
        error = torch.linalg.norm(ours[name] - tensor.grad) / torch.linalg.norm(tensor.grad)
        assert error < 1e-6, name  # written as float32
    # and the directory is PEFT's, three layers of it, and written once
    assert len(tensors) == 3 * 2 * len(lora.targets)
    said = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (said["peft_type"], said["r"], said["lora_alpha"]) == ("LORA", lora.rank, lora.alpha)
    assert said["base_model_name_or_path"] == "some/base"
    assert said["target_modules"] == sorted(f"{name}_proj" for name in lora.targets)
    with pytest.raises(UserError, match="exists already"):
        exported(tmp_path / "adapter", adapters, lora)


def test_a_run_starts_at_its_base_model():
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


def test_adapters_are_cut_as_their_matrices_are():
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


def test_a_run_exports_the_adapters_of_a_full_state(tmp_path, capfd):
    # given a run that trains adapters, and its full state after two steps
    lora = Lora(rank=2, alpha=4.0, targets=["q", "down"])
    spec = changed(tiny_spec(), learner={"lora": lora})
    run = Run(tmp_path / "run", spec)
    write_initial_model(run)
    drawn = init_lora(model_config(spec), lora, jax.random.key(0))
    adapters = jax.tree.map(lambda leaf: leaf + 1, drawn)
    state = TrainState(adapters, {"not": adapters}, jnp.zeros((), jnp.int32))
    info = StateInfo(2, None, spec.seed, "0" * 64, True, {})
    save_state(state_folder(run.path, spec), info, state, keep=1)()
    # when they are exported
    out = tmp_path / "adapter"
    assert main(["export-adapter", str(run.path), str(out)]) == 0
    # then the directory holds them, and a step of which there is no state is named
    tensors = load_file(out / "adapter_model.safetensors")
    name = "base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"
    written = np.asarray(adapters["layers"]["mlp"]["down"]["a"][1]).T
    np.testing.assert_array_equal(tensors[name], written)
    assert len(tensors) == 2 * 2 * 2
    assert main(["export-adapter", str(run.path), str(tmp_path / "b"), "--step", "1"]) == 1
    assert "no full state of step 1; there are: 2" in capfd.readouterr().err
