"""Cores and thread limits by role."""

from __future__ import annotations

from runspec.local.cores import (
    assign_cores,
    jax_environment,
    thread_limits,
    visible_devices,
    vllm_environment,
)


def test_one_core_is_shared_by_all() -> None:
    assert assign_cores(["learner", "a"], [0]) == {}


def test_on_two_cores_learner_and_sampler_have_one_each() -> None:
    assert assign_cores(["learner", "a"], [0, 1]) == {"learner": (0,), "a": (1,)}


def test_a_second_sampler_shares_with_the_first_not_with_the_learner() -> None:
    assert assign_cores(["learner", "a", "b"], [4, 5]) == {"learner": (4,), "a": (5,), "b": (5,)}


def test_many_cores_are_shared_equally_and_some_are_left_for_the_rest() -> None:
    assigned = assign_cores(["learner", "a", "b"], range(8))
    assert assigned == {"learner": (0, 1), "a": (2, 3), "b": (4, 5)}


def test_no_core_is_given_twice_while_there_are_enough() -> None:
    for busy in range(1, 6):
        for cores in range(busy, 20):
            given = [
                c for mine in assign_cores([*"abcde"[:busy]], range(cores)).values() for c in mine
            ]
            assert len(given) == len(set(given))


def test_thread_pools_are_no_larger_than_the_cores() -> None:
    assert thread_limits(())["OMP_NUM_THREADS"] == "1"
    assert thread_limits((2, 3))["OMP_NUM_THREADS"] == "2"


def test_jax_on_a_cpu_has_the_mesh_as_virtual_devices_and_keeps_flags() -> None:
    env = jax_environment({"XLA_FLAGS": "--xla_dump_to=/tmp/x"}, on_cpu=True, devices=2)
    assert env["JAX_PLATFORMS"] == "cpu"
    assert env["XLA_FLAGS"].split() == [
        "--xla_dump_to=/tmp/x",
        "--xla_cpu_multi_thread_eigen=false",
        "--xla_force_host_platform_device_count=2",
    ]
    assert jax_environment({}, on_cpu=False, devices=64) == {}


def test_vllm_on_a_cpu_is_bound_to_its_cores() -> None:
    env = vllm_environment((1,), on_cpu=True, tensor=1)
    assert env["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert vllm_environment((), on_cpu=True, tensor=1)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert vllm_environment((1, 2), on_cpu=True, tensor=2)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in vllm_environment((), on_cpu=False, tensor=4)


def test_devices_are_named_in_the_words_of_their_driver() -> None:
    assert visible_devices("h100-80g", None) == {}
    assert visible_devices("h100-80g", []) == {"CUDA_VISIBLE_DEVICES": ""}
    assert visible_devices("rtx-4090", [2, 0]) == {"CUDA_VISIBLE_DEVICES": "2,0"}
    # three chips are no rectangle: libtpu has to say so itself
    assert visible_devices("tpu-v5e", [0, 1, 2]) == {"TPU_VISIBLE_CHIPS": "0,1,2"}
    assert visible_devices("tpu-v5e", [0, 1, 2, 3]) == {
        "TPU_VISIBLE_CHIPS": "0,1,2,3",
        "TPU_PROCESS_BOUNDS": "1,1,1",
        "TPU_CHIPS_PER_PROCESS_BOUNDS": "2,2,1",
    }
