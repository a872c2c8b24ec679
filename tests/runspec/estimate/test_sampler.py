from __future__ import annotations

import pytest

from runspec.core.models.parameters import parameter_count
from runspec.estimate.sampler import MEMORY_UTILIZATION, sampler_memory, weight_bytes
from tests.runspec.estimate.shipped import shipped


def pool_with(*overrides: str):
    spec, config = shipped(*(f"samplers.volunteers.{one}" for one in overrides))
    return spec.samplers[0], spec, config


def test_one_rank_holds_every_parameter_once() -> None:
    pool, _, config = pool_with("parallel.tensor=1")

    assert weight_bytes(pool, config) == 2 * parameter_count(config)


def test_ranks_divide_the_matrices_and_repeat_the_norms() -> None:
    one, _, config = pool_with("parallel.tensor=1")
    four, _, _ = pool_with("parallel.tensor=4")
    norms = 2 * config.hidden_size * (2 * config.num_hidden_layers + 1)

    whole, part = weight_bytes(one, config), weight_bytes(four, config)

    assert 4 * (part - norms) == whole - norms


def test_ranks_beyond_the_heads_keep_copies_of_keys_and_values() -> None:
    eight, _, config = pool_with("parallel.tensor=8")
    sixteen, _, _ = pool_with("parallel.tensor=16")
    # Of k and v, whose 8 heads of 128 are 1,024 columns and biases, each rank has one head.
    one_head = 2 * 2 * config.num_hidden_layers * (config.hidden_size + 1) * config.head_dim
    norms = 2 * config.hidden_size * (2 * config.num_hidden_layers + 1)

    rest = weight_bytes(eight, config) - norms - one_head

    assert weight_bytes(sixteen, config) == norms + one_head + rest / 2


def test_fp8_halves_the_matrices_but_not_embedding_and_head() -> None:
    plain, _, config = pool_with("parallel.tensor=1")
    quantised, _, _ = pool_with("parallel.tensor=1", "quantization=fp8")
    outside = 2 * 2 * config.vocab_size * config.hidden_size

    saved = weight_bytes(plain, config) - weight_bytes(quantised, config)

    assert saved == pytest.approx((weight_bytes(plain, config) - outside) / 2, rel=1e-3)


@pytest.mark.parametrize(("ranks", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1)])
def test_a_head_of_keys_and_values_is_never_cut(ranks: int, heads: int) -> None:
    pool, spec, config = pool_with(f"parallel.tensor={ranks}")

    memory = sampler_memory(pool, spec, config)

    # QwQ-32B: 64 layers, heads of 128 numbers, keys and values, bfloat16.
    assert memory.kv_token == 2 * 64 * heads * 128 * 2


def test_room_is_what_vllm_may_use_less_weights_and_activations() -> None:
    pool, spec, config = pool_with()

    memory = sampler_memory(pool, spec, config)

    assert memory.room is not None and memory.kv_tokens is not None
    assert memory.room + memory.weights + memory.activations == MEMORY_UTILIZATION * 80e9
    assert memory.kv_tokens * memory.kv_token <= memory.room
    assert memory.full_sequences == memory.kv_tokens / pool.max_model_len


def test_weights_that_do_not_fit_leave_room_for_nothing() -> None:
    pool, spec, config = pool_with("parallel.tensor=1", "hardware.memory=24GB")

    memory = sampler_memory(pool, spec, config)

    assert memory.room is not None and memory.room < 0
    assert memory.kv_tokens == 0 and memory.full_sequences == 0


def test_hardware_that_no_table_knows_has_no_room_to_tell() -> None:
    pool, spec, config = pool_with("hardware.kind=abacus")

    memory = sampler_memory(pool, spec, config)

    assert memory.room is None and memory.kv_tokens is None and memory.full_sequences is None


def test_the_laptop_has_room_for_all_its_sequences() -> None:
    spec, config = shipped(profile="laptop")

    memory = sampler_memory(spec.samplers[0], spec, config)

    # 3 layers, one head of 32, float32: 768 bytes a token; 64 MiB are for 87,381 of them.
    assert memory.kv_token == 768
    assert memory.room == 64 << 20
    assert memory.full_sequences == 256


def test_proofs_keep_the_last_hidden_states_of_every_sequence_in_flight() -> None:
    pool, spec, config = pool_with("max_new_tokens=1000")

    memory = sampler_memory(pool, spec, config)

    # 44 rows of 5120 numbers in bf16; a token and a log-prob of 4 bytes each
    assert memory.captured == 256 * (44 * 5120 * 2 + 1000 * 8)
