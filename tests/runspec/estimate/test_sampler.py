from __future__ import annotations

import pytest

from runspec.core.models.memory import MEMORY_UTILIZATION
from runspec.estimate.sampler import sampler_memory, weight_bytes
from tests.runspec.estimate.shipped import shipped


def pool_with(*overrides: str):
    spec, config = shipped(*(f"samplers.volunteers.{one}" for one in overrides))
    return spec.samplers[0], spec, config


def test_ranks_divide_the_matrices_and_repeat_the_norms() -> None:
    one, _, config = pool_with("parallel.tensor=1")
    four, _, _ = pool_with("parallel.tensor=4")
    norms = 2 * config.hidden_size * (2 * config.num_hidden_layers + 1)

    whole, part = weight_bytes(one, config), weight_bytes(four, config)

    assert 4 * (part - norms) == whole - norms


def test_fp8_halves_the_matrices_but_not_embedding_and_head() -> None:
    plain, _, config = pool_with("parallel.tensor=1")
    quantised, _, _ = pool_with("parallel.tensor=1", "quantization=fp8")
    outside = 2 * 2 * config.vocab_size * config.hidden_size

    saved = weight_bytes(plain, config) - weight_bytes(quantised, config)

    assert saved == pytest.approx((weight_bytes(plain, config) - outside) / 2, rel=1e-3)


def test_room_is_what_vllm_may_use_less_weights_and_activations() -> None:
    pool, spec, config = pool_with()

    memory = sampler_memory(pool, spec, config)

    assert memory.room is not None and memory.kv_tokens is not None
    assert memory.room + memory.weights + memory.activations == MEMORY_UTILIZATION * 80e9
    assert memory.kv_tokens * memory.kv_token <= memory.room
    assert memory.full_sequences == memory.kv_tokens / pool.max_model_len


def test_proofs_keep_the_last_hidden_states_of_every_sequence_in_flight() -> None:
    pool, spec, config = pool_with("max_new_tokens=1000")

    memory = sampler_memory(pool, spec, config)

    # 44 rows of 5120 numbers in bf16; a token and a log-prob of 4 bytes each
    assert memory.captured == 256 * (52 * 5120 * 2 + 1000 * 8)
