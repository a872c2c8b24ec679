"""Cores and thread limits by role."""

from __future__ import annotations

import os
import subprocess
import sys

from runspec.local.cores import (
    assign_cores,
    jax_environment,
    visible_devices,
)


def test_a_second_sampler_shares_with_the_first_not_with_the_learner() -> None:
    assert assign_cores(["learner", "a", "b"], [4, 5]) == {"learner": (4,), "a": (5,), "b": (5,)}


def test_many_cores_are_shared_equally_and_some_are_left_for_the_rest() -> None:
    assigned = assign_cores(["learner", "a", "b"], range(8))
    assert assigned == {"learner": (0, 1), "a": (2, 3), "b": (4, 5)}


def test_jax_on_a_cpu_has_the_mesh_as_virtual_devices_and_keeps_flags() -> None:
    env = jax_environment({"XLA_FLAGS": "--xla_dump_to=/tmp/x"}, on_cpu=True, devices=2)
    assert env["JAX_PLATFORMS"] == "cpu"
    assert env["XLA_FLAGS"].split() == [
        "--xla_dump_to=/tmp/x",
        "--xla_cpu_multi_thread_eigen=false",
        "--xla_force_host_platform_device_count=2",
    ]
    assert jax_environment({}, on_cpu=False, devices=64) == {}


def test_two_devices_on_one_core_have_threads_for_many_collectives() -> None:
    # given a learner that is pinned to one core
    script = """if True:
        import os, pathlib, jax
        os.sched_setaffinity(0, list(os.sched_getaffinity(0))[:1])
        jax.devices()
        names = [each.read_text() for each in pathlib.Path("/proc/self/task").glob("*/comm")]
        print(len([name for name in names if "XLAEigen" in name]))
    """
    env = os.environ | jax_environment({}, on_cpu=True, devices=2)
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    # then XLA's threads are more than its devices
    assert int(done.stdout) == 8


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
