"""Swarm files: what is wrong with one is said with its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.core.errors import BadUsage
from runspec.simulate.population import read_swarm
from tests.runspec.cli.in_process import runspec
from tests.runspec.simulate.simulated import LAPTOP

PLAIN = "workers:\n  - {name: own, count: 1}\n"


def written(folder: Path, text: str) -> Path:
    path = folder / "swarm.yaml"
    path.write_text(text)
    return path


def test_a_plain_file_has_defaults(tmp_path: Path):
    swarm = read_swarm(written(tmp_path, PLAIN))
    assert [group.name for group in swarm.workers] == ["own"]
    assert swarm.workers[0].strategy.kind == "honest"
    assert swarm.validators.count is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (PLAIN + "  - {name: x, count: 1, stay: 3h}\n", "swarm.yaml:3:25: error unknown-key"),
        (PLAIN + "  - {name: x, count: 1, stay: 3h}\n", "did you mean stays?"),
        (PLAIN + "  - {name: x, count: 1, stays: 3}\n", "swarm.yaml:3:32"),
        (PLAIN + "  - {name: x}\n", "workers.x.count: a required key is missing"),
        (PLAIN + "  - {name: x, count: 1, strategy: {kind: rubish}}\n", "did you mean rubbish?"),
        (PLAIN + "  - {name: own, count: 1}\n", "two groups of one name"),
        ("workers: []\n", "workers"),
        ("- 1\n", "a map was expected"),
        ("workers: [\n", "broken YAML"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(text: str, said: str, tmp_path: Path):
    with pytest.raises(BadUsage) as caught:
        read_swarm(written(tmp_path, text))
    assert said in str(caught.value)


def test_a_file_that_is_not_there_is_bad_usage(tmp_path: Path):
    ended = runspec("simulate", *LAPTOP, "--swarm", tmp_path / "none.yaml")
    assert ended.returncode == 2
    assert "none.yaml: cannot be read" in ended.stderr


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("pool: elsewhere", "the run has no pool 'elsewhere'"),
        ("hardware: {kind: cpu}", "the speed of cpu is not known"),
    ],
)
def test_a_group_that_does_not_fit_the_spec_is_named(more: str, said: str, tmp_path: Path):
    swarm = written(tmp_path, f"workers: [{{name: own, count: 1, {more}}}]\n")
    ended = runspec("simulate", *LAPTOP, "--swarm", swarm)
    assert ended.returncode == 1
    assert said in ended.stderr
    assert "own" in ended.stderr
