"""Useful FLOPs against a compiled program's, published sizes and the devices' data sheets."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from learner_jax.execution import Execution
from learner_jax.hlo import program_cost
from learner_jax.model import abstract_params, bind
from learner_jax.packing import TokenBatch
from learner_jax.report import Meter, peak_flops
from learner_jax.step import policy_logprobs
from runspec.core.models.config import ModelConfig
from runspec.core.models.flops import matrix_parameters, useful_flops
from runspec.core.spec.schema import Lora

CONFIG = ModelConfig("qwen2", 40, 24, 56, 3, 4, 2, 10, 64, 10000.0, 1e-6, False, True)
METAGENE = ModelConfig("llama", 1024, 4096, 11008, 32, 32, 32, 128, 512, 10000.0, 1e-5, False)


def test_the_forward_third_is_what_the_compiled_program_multiplies() -> None:
    # given a row that one sample fills, and attention that computes the masked half as well
    n = 48
    params = jax.tree.map(
        lambda spec: jax.ShapeDtypeStruct(spec.shape, jnp.float32), abstract_params(CONFIG)
    )
    ids = jax.ShapeDtypeStruct((1, n), jnp.int32)

    def forward(params: Any, batch: TokenBatch) -> Any:
        return policy_logprobs(bind(CONFIG, params), batch, Execution(jnp.float32), temperature=1.0)

    # when the log-probs are compiled, and the products of matrices in the program counted
    program = jax.jit(forward)
    compiled = program.lower(params, TokenBatch(ids, ids, ids, ids)).compile()
    # then they are a third of an update's, and the masked half
    masked = 2 * 3 * (4 * 10) * n**2
    assert program_cost(compiled.as_text()).flops == useful_flops(CONFIG, [n]) / 3 + masked


def test_matrix_parameters_of_a_published_model() -> None:
    # given METAGENE-1's 6,484,660,224 parameters: what is no matrix is the embedding and 65 norms
    assert matrix_parameters(METAGENE) == 6_484_660_224 - 1024 * 4096 - 65 * 4096


def test_attention_grows_with_the_square_of_each_sample() -> None:
    # given the same tokens in one sample and in four, then only attention differs
    one, four = (useful_flops(METAGENE, lengths) for lengths in ([512], [128] * 4))
    assert one - four == 6 * 32 * 4096 * (512**2 - 4 * 128**2)
    assert useful_flops(METAGENE, [300, 5]) == sum(useful_flops(METAGENE, [n]) for n in (300, 5))


def test_adapters_spare_the_gradients_of_the_matrices() -> None:
    # given adapters of rank 8 on two of a layer's matrices, [24, 40] and [56, 24]
    lora = Lora(rank=8, targets=["q", "down"])
    adapters = 3 * 8 * (24 + 40 + 56 + 24)
    expected = useful_flops(CONFIG, [48]) - 2 * matrix_parameters(CONFIG) * 48 + 6 * adapters * 48
    assert useful_flops(CONFIG, [48], lora) == expected


@pytest.mark.parametrize(
    ("kind", "teraflops"),
    [
        ("TPU v4", 275),
        ("TPU v5 lite", 197),
        ("TPU v5p", 459),
        ("TPU v5", 459),
        ("TPU v6 lite", 918),
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
    ],
)
def test_peaks_of_devices_as_they_call_themselves(kind: str, teraflops: int) -> None:
    assert peak_flops(kind) == teraflops * 1e12


def test_mfu_is_the_share_of_all_devices_peak_and_null_without_one() -> None:
    lengths, useful = [48, 7], useful_flops(CONFIG, [48, 7])
    assert Meter(CONFIG, None, 4, 1e9).mfu(lengths, 0.5) == pytest.approx(useful / (0.5 * 4e9))
    here = peak_flops(jax.devices("cpu")[0].device_kind)
    assert Meter(CONFIG, None, 4, here).mfu(lengths, 0.5) is None
