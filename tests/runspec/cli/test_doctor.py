"""`runspec doctor`: this machine as it is, machines that lack things, and a spec."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runspec.cli.doctor import check_spec_here, doctor_command
from runspec.core.spec.load import SpecFiles
from runspec.local.checkup import check_machine
from runspec.local.machine import Machine, this_machine
from runspec.local.preflight import Facts
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


def test_what_a_spec_lacks_here_fails_with_its_remedy(tmp_path: Path) -> None:
    facts = replace(HERE, has_module=lambda name: name not in ("vllm", "tokenizers"))
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
