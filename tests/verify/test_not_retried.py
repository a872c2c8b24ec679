"""Roles that meet what every further try would meet end with the exit code that stops the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from runspec.core.keys import SigningKey
from runspec.core.process import EXIT_FINAL
from runspec.core.spec.schema import Reward, RunSpec
from tests.verify.coordinator.deployment import Site, tiny_spec

pytestmark = pytest.mark.slow


def ended(site: Site, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A role's process, run to its end."""
    key = folder / "role.key"
    (site.validator if command[0] == "verify" else SigningKey.generate()).save(key)
    options = ["--run", site.run, "--coordinator", site.url, "--weights", site.weights]
    options += ["--public-key", site.root.public_hex, "--key", str(key), "--dir", str(folder)]
    return subprocess.run(
        [sys.executable, "-m", *command, *options], capture_output=True, text=True, timeout=60
    )


def with_engine(name: str) -> RunSpec:
    spec = tiny_spec()
    verify = spec.verify.model_copy(update={"engine": name})
    return spec.model_copy(update={"verify": verify})


def with_reward(kind: str) -> RunSpec:
    reward = Reward.model_validate({"name": "mine", "kind": kind})
    return tiny_spec().model_copy(update={"reward": [reward]})


def test_a_validator_whose_engine_is_not_installed(tmp_path: Path) -> None:
    site = Site(tmp_path, with_engine("no_such_engine"))
    with site.origin(), site.serving():
        done = ended(site, tmp_path / "validator", "verify", "validator")
    assert done.returncode == EXIT_FINAL, done.stderr
    assert "no plug-in 'no_such_engine'" in done.stderr and "remedy: install" in done.stderr


def test_a_worker_whose_reward_is_not_installed(tmp_path: Path) -> None:
    site = Site(tmp_path, with_reward("chess"))
    with site.origin(), site.serving():
        done = ended(site, tmp_path / "worker", "sampler", "work", "--pool", "near")
    assert done.returncode == EXIT_FINAL, done.stderr
    assert "no plug-in offers kind 'chess'" in done.stderr and "remedy: install" in done.stderr


def test_a_coordinator_that_cannot_read_its_spec(tmp_path: Path) -> None:
    site = Site(tmp_path, tiny_spec())
    (site.run_dir / "spec.json").write_text("{")
    with site.origin(), site.process(9) as coordinator:
        _, said = coordinator.communicate(timeout=60)
    assert coordinator.returncode == EXIT_FINAL, said
    assert "spec.json" in said
