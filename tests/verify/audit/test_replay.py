"""The environment in which an audit trains steps again, from a record that anybody can write.

What a replay finds is in `tests/learner_jax/test_replay.py`, one of a run in `tests/e2e`.
"""

import sys
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from tests.learner_jax.conftest import Run, tiny_spec
from verify.audit.replay import environment, replay

MADE_ON = {
    "platform": "cpu",
    "mesh": {"data": 1, "fsdp": 4, "context": 1, "tensor": 2},
    "processes": 2,
    "threads": 3,
    "nproc": "16",
    "xla_flags": ["--xla_cpu_multi_thread_eigen=false"],
}


def test_it_has_the_devices_threads_and_flags_of_the_program_that_trained():
    env, threads = environment(MADE_ON, 8)
    eigen, devices = env["XLA_FLAGS"].split()
    assert (eigen, devices) == (*MADE_ON["xla_flags"], "--xla_force_host_platform_device_count=8")
    assert (env["JAX_PLATFORMS"], env["NPROC"], threads) == ("cpu", "16", 3)
    # and no more cores than there are; on accelerators all is as it is here
    assert environment(MADE_ON, 2)[1] == 2
    assert environment(MADE_ON | {"platform": "tpu"}, 8) == ({}, 8)


def test_a_record_gives_xla_switches_and_levels_and_no_file():
    hostile = ["--xla_dump_to=1", "--xla_gpu_dump_llvmir=true", "--xla_x=/home", "--xla_x=1 --y=2"]
    honest = ["--xla_backend_optimization_level=0", "--xla_cpu_multi_thread_eigen=true"]
    flags = [*hostile, *honest, "--xla_force_host_platform_device_count=9"]
    env, _ = environment(MADE_ON | {"xla_flags": flags, "nproc": "1" * 9}, 8)
    assert env["XLA_FLAGS"].split()[:-1] == honest
    assert env["NPROC"] == "4096"


@pytest.mark.parametrize("record", ["", "[]", '{"fingerprint": {"platform": "cpu"}}'])
def test_a_record_that_is_none_is_named(record: str, tmp_path: Path):
    run = Run(tmp_path / "run", tiny_spec())
    newest = run.path / "checkpoints" / "state" / "step_2"
    newest.mkdir(parents=True)
    (newest / "state.json").write_text(record)
    with pytest.raises(UserError, match="not the record of a full state") as caught:
        replay(run.path, "1", sys.stderr)
    assert caught.value.place == str(newest)
