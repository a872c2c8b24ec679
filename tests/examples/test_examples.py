"""Each example does what its README says. `test_model_family` has those of the model family."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from runspec.core.schema.load import parse_resolved
from runspec.local.backend import backend
from tests.examples.installed import EXAMPLES, installed_paths
from tests.harness import ROOT
from tests.runspec.cli.in_process import runspec

pytestmark = pytest.mark.slow


def test_the_list_has_every_example() -> None:
    folders = {path.parent for path in EXAMPLES.glob("*/README.md")}
    listed = (EXAMPLES / "README.md").read_text()
    assert len(folders) == 4
    assert {folder for folder in folders if f"({folder.name})" not in listed} == set()


def test_the_reward_grades_and_its_spec_is_clean(tmp_path: Path) -> None:
    example = EXAMPLES / "problems_and_reward"
    paths = os.pathsep.join(installed_paths("problems_and_reward", tmp_path / "site"))

    def run(*words: str) -> str:
        command = [sys.executable, "-m", *words]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([paths, str(ROOT)])}
        done = subprocess.run(command, cwd=example, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    graded = run("sampler", "grade", "answers.jsonl", "--json").splitlines()
    assert [json.loads(line)["reward"] for line in graded] == [1.0, 0.75, 0.0]
    # then no finding is left, of the spec, or of the problems and their truths
    assert run("runspec", "lint", "--data", "--fail-level", "warning", "spec.yaml") == ""


def test_the_backend_sends_a_run_to_its_machine_and_commands_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given an `ssh` that writes down what it is asked, and exits with 7
    ssh = tmp_path / "bin" / "ssh"
    ssh.parent.mkdir()
    ssh.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\ncat > {tmp_path}/given\nexit 7\n')
    ssh.chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", f"{ssh.parent}:{os.environ['PATH']}")
    for path in installed_paths("ssh_backend", tmp_path / "site"):
        monkeypatch.syspath_prepend(path)
    backend.cache_clear()
    # when a run is applied and its state asked, then both go there, with their exit codes
    spec, runs = EXAMPLES / "lint_in_ci" / "specs" / "sums.yaml", ("--runs-dir", tmp_path / "runs")
    sets = [f"--set=placement.{each}" for each in ("backend=ssh", "address=me@far")]
    assert runspec("apply", spec, *runs, *sets, "--detach").returncode == 7
    sent = parse_resolved((tmp_path / "given").read_bytes(), place="sent")
    assert (sent.name, sent.placement.backend) == ("sums", "ssh")
    assert runspec("status", "sums", *runs).returncode == 7
    applied, asked = (tmp_path / "asked").read_text().splitlines()
    begins = "me@far env RUNSPEC_AT_TRUNK=me@far runspec"
    assert applied == f"{begins} apply --resolved - --runs-dir runs --detach"
    assert asked.startswith(f"-t {begins} status sums") and asked.endswith("--runs-dir runs")
    backend.cache_clear()


def test_the_workflow_calls_ours_and_its_specs_are_clean() -> None:
    example = EXAMPLES / "lint_in_ci"
    called = yaml.safe_load((example / ".github" / "workflows" / "specs.yaml").read_text())
    [job] = called["jobs"].values()
    ours, _, _ = job["uses"].removeprefix("OWNER/REPOSITORY/").partition("@")
    # PyYAML reads the key `on` as true.
    inputs = yaml.safe_load((ROOT / ours).read_text())[True]["workflow_call"]["inputs"]
    required = {name for name, each in inputs.items() if each.get("required")}
    assert required <= set(job["with"]) <= set(inputs)
    specs = sorted(example.glob(job["with"]["specs"]))
    level = job["with"]["fail-level"]
    done = runspec("lint", "--format", "github", "--fail-level", level, *specs)
    assert specs and (done.returncode, done.stdout) == (0, "")
