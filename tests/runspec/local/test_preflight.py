"""What keeps a run from starting, on machines of every kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runspec.lint.check import check_spec
from runspec.local.machine import find_model, module_is_installed
from runspec.local.preflight import GIB, Facts, disk_bytes, missing
from runspec.local.processes import Machine
from runspec.spec.load import SpecFiles
from runspec.spec.schema import RunSpec
from tests.runspec.local.fake_run import ROOT, small_spec

REVISION = "0123456789abcdef0123456789abcdef01234567"
LAPTOP = Facts(
    machine=Machine("python", (0, 1), {}),
    gpus=(),
    tpus=0,
    free_bytes=100 * GIB,
    has_module=lambda name: True,
    prefill_engines=("jax",),
)


@pytest.fixture
def full_spec() -> RunSpec:
    return check_spec(SpecFiles(ROOT / "specs" / "target_long.yaml"), environ={}).require()


def model_in_cache(home: Path) -> Path:
    snapshot = home / "hub" / "models--Qwen--QwQ-32B" / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(bytes(1000))
    return snapshot


def paths(spec: RunSpec, facts: Facts, run_dir: Path) -> list[str]:
    return [item.path for item in missing(spec, run_dir, facts)]


def test_the_laptop_profile_lacks_nothing_on_a_laptop(tmp_path: Path) -> None:
    assert missing(small_spec(), tmp_path, LAPTOP) == []


def test_a_laptop_lacks_all_of_the_full_run(full_spec: RunSpec, tmp_path: Path) -> None:
    found = {item.path: item.thing for item in missing(full_spec, tmp_path, LAPTOP)}
    assert list(found)[:4] == [
        "learner.hardware",
        "samplers.volunteers.hardware",
        "verify.validators",
        "model.hf",
    ]
    assert "tpu-v5p 4x4x4 (64 TPU chips)" in found["learner.hardware"]
    assert "h100-80g x 4" in found["samplers.volunteers.hardware"]
    assert "Qwen/QwQ-32B" in found["model.hf"]
    assert "HF_TOKEN is not set" in found["secrets.HF_TOKEN"]
    assert {"identity.root_public_key", "broadcast.relays.eu.url"} <= set(found)


def test_hardware_that_is_there_is_not_missed(full_spec: RunSpec, tmp_path: Path) -> None:
    facts = replace(LAPTOP, tpus=64, gpus=["NVIDIA H100 80GB HBM3"] * 4)
    left = paths(full_spec, facts, tmp_path)
    assert not any("hardware" in path for path in left)
    assert "identity.root_public_key" not in left, "a throw-away root does on one machine"
    three = replace(facts, gpus=["NVIDIA H100 80GB HBM3"] * 3 + ["NVIDIA A100-SXM4-80GB"])
    assert "samplers.volunteers.hardware" in paths(full_spec, three, tmp_path)


def test_several_hosts_are_a_rehearsal_on_a_cpu_and_machines_elsewhere(
    full_spec: RunSpec, tmp_path: Path
) -> None:
    learner = full_spec.learner.model_copy(update={"hosts": 16})
    spread = full_spec.model_copy(update={"learner": learner})
    assert "learner.hosts" in paths(spread, LAPTOP, tmp_path)
    assert missing(small_spec("small", 5, "learner.hosts=2"), tmp_path, LAPTOP) == []


def test_a_secret_that_is_set_is_not_missed(full_spec: RunSpec, tmp_path: Path) -> None:
    facts = replace(LAPTOP, machine=Machine("python", (0,), {"HF_TOKEN": "x"}))
    assert "secrets.HF_TOKEN" not in paths(full_spec, facts, tmp_path)


def test_missing_packages_are_named_with_their_remedy(tmp_path: Path) -> None:
    facts = replace(LAPTOP, has_module=lambda name: name != "vllm")
    (item,) = missing(small_spec(), tmp_path, facts)
    assert "vllm (sampler)" in item.thing
    assert item.remedy == "make install"


def test_a_disk_too_small_is_named_with_both_figures(tmp_path: Path) -> None:
    (item,) = missing(small_spec(), tmp_path, replace(LAPTOP, free_bytes=GIB // 4))
    assert item.thing == "about 0.5 GiB of disk are needed, 0.2 are free"


def test_an_unknown_prefill_engine_is_named(tmp_path: Path) -> None:
    (item,) = missing(small_spec("small", 5, "verify.engine=abacus"), tmp_path, LAPTOP)
    assert item.thing == "no prefill engine 'abacus'; installed: jax"


def test_disk_is_reckoned_from_the_shape() -> None:
    # given hidden 64, 2 heads of 32 with 1 KV head, MLP 192, 3 layers, vocabulary 192, untied
    attention = 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64
    layer = attention + 3 * 64 * 192 + 2 * 64
    parameters = 3 * layer + 2 * 192 * 64 + 64
    # then the disk holds 6 versions in 3 places of 4 bytes each, and 3 states of 12 bytes
    assert disk_bytes(small_spec(), LAPTOP) == parameters * (4 * 6 * 3 + 12 * 3) + GIB // 2


def test_a_model_is_found_in_a_directory_or_in_the_cache(tmp_path: Path) -> None:
    snapshot = model_in_cache(tmp_path)
    env = {"HF_HOME": str(tmp_path)}
    assert find_model("Qwen/QwQ-32B", REVISION, env) == snapshot
    assert find_model("Qwen/QwQ-32B", None, env) is None, "which commit `main` is was never asked"
    main = snapshot.parent.parent / "refs" / "main"
    main.parent.mkdir()
    main.write_text(REVISION)
    assert find_model("Qwen/QwQ-32B", None, env) == snapshot
    assert find_model(str(snapshot), None, {}) == snapshot
    assert find_model("../../etc", "passwd", env) is None


@pytest.mark.parametrize(
    ("name", "installed"), [("runspec.spec", True), ("no_such", False), ("no_such.inner", False)]
)
def test_a_missing_parent_is_a_missing_module(name: str, installed: bool) -> None:
    assert module_is_installed(name) is installed
