"""The laptop's task, as the shipped spec describes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from runspec.core.schema import RunSpec
from runspec.core.schema.load import SpecFiles
from runspec.lint.check import check_spec
from sampler.tasks.task_set import RunTask, build_task_set
from sampler.tasks.traces import WarmStartTraces, build_warm_start_data

SPECS = Path(__file__).parents[3] / "specs"


NUMBERS = ("reward.length.alpha=0.05", "reward.spelling.timeout=10m", "warm_start.obey_share=0.3")
"""What the tests' own numbers speak of, whatever the profile is tuned to."""


def laptop_spec(*overrides: str) -> RunSpec:
    path = SPECS / "target_short.yaml"
    return check_spec(SpecFiles(path, profile="laptop", overrides=(*NUMBERS, *overrides))).require()


@pytest.fixture(scope="session")
def data() -> WarmStartTraces:
    return build_warm_start_data(laptop_spec())


@pytest.fixture(scope="session")
def tokenizer_dir(data: WarmStartTraces, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tokenizer")
    data.write_tokenizer(directory)
    return directory


@pytest.fixture(scope="session")
def task(tokenizer_dir: Path) -> RunTask:
    return build_task_set(laptop_spec(), tokenizer_dir)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where kept rows are remembered: nowhere that outlives a test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "runspec" / "problems"
