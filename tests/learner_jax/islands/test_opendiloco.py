"""Islands compute what OpenDiLoCo's own method computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from bridge.codecs import codec
from bridge.flat import FlatLayout
from learner_jax.islands.outer import OuterState, encode_share, outer_update, weighted_mean
from learner_jax.leaves import HostLeaves, leaf_path, load_params
from learner_jax.sharding import make_mesh
from learner_jax.step import Programs, build_programs
from learner_jax.supervised import supervised_step
from runspec.core.models.family import load_config
from tests.learner_jax.document_rows import PACKING, joined, rows_of, supervised_spec
from tests.learner_jax.islands import opendiloco

STEPS, ISLANDS, UPDATES, LR = 20, 2, 3, 3e-3
ROWS = 2 * PACKING.rows


@dataclass(frozen=True)
class Outer:
    """The paper's."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True


def saved_model(folder: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, **heads))
    model.to(torch.float32).save_pretrained(folder)
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


def sequences() -> np.ndarray:
    """Counting by one, two or three, modulo 16: int64 [steps, islands, updates, rows, tokens]."""
    rng = np.random.default_rng(0)
    shape = (STEPS, ISLANDS, UPDATES, ROWS, 1)
    return (rng.integers(16, size=shape) + rng.integers(1, 4, shape) * np.arange(30)) % 16


def masters_of(layout: FlatLayout, theta: np.ndarray, programs: Programs) -> Any:
    """Outer parameters as the masters of an island."""
    leaves = dict(layout.leaves(theta))
    return jax.tree.map_with_path(
        lambda path, like: jax.device_put(leaves[leaf_path(path)], like.sharding),
        programs.abstract_state.params,
    )


def island_losses(directory: Path, data: np.ndarray) -> list[float]:
    """The mean loss of each step, by the learner's programs and the outer optimizer."""
    spec = supervised_spec(
        optimizer={"lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.1, "clip_norm": 1.0},
        updates_per_step=UPDATES,
        steps=STEPS,
    )
    config, mesh = load_config(directory), make_mesh(spec.learner.mesh)
    programs, layout, each = (
        build_programs(spec, config, mesh),
        FlatLayout(config),
        codec("float32"),
    )
    params = load_params(directory, config, mesh)
    outer = OuterState.initial(layout.flatten(HostLeaves(params)))
    states = [programs.init_state(params) for _ in range(ISLANDS)]
    means = []
    for step in data:
        shares, losses = [], []
        for island, local in enumerate(step):
            masters = masters_of(layout, outer.theta, programs)
            rows = joined(*(rows_of(spec, list(update.astype(np.int32))) for update in local))
            state = replace(states[island], params=masters)
            result = supervised_step(spec, mesh, programs, state, rows)
            states[island] = result.state
            delta = outer.theta - layout.flatten(HostLeaves(result.state.params))
            shares.append(encode_share(each, delta, None)[0])
            losses.append(result.numbers["loss"])
        decoded = (each.decode(share, layout.size) for share in shares)
        outer = outer_update(outer, weighted_mean(decoded, [1.0] * ISLANDS), Outer())
        means.append(sum(losses) / len(losses))
    return means


def test_losses_are_those_of_opendiloco_over_twenty_outer_steps(tmp_path: Path) -> None:
    # given a model and three islands' data
    directory, data = saved_model(tmp_path / "model"), sequences()
    # when both train it
    expected = opendiloco.train(
        AutoModelForCausalLM.from_pretrained(directory), torch.from_numpy(data), LR
    )
    found = island_losses(directory, data)
    # then it learns, and the losses are the same
    assert found[-1] < 0.5 * found[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4)
