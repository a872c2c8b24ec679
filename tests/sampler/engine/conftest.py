"""One vLLM engine for each kind of model, for the whole session: starting one takes seconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from runspec.spec.schema import SamplerPool
from sampler.engine.engine import Engine
from tests.sampler.engine.models import MAX_MODEL_LEN, MAX_NEW_TOKENS, save_version

# On a busy machine threads that wait for each other at every operator cost a hundredfold. vLLM
# forbids the call later on.
torch.set_num_threads(1)


def cpu_pool(dtype: str = "float32", tensor: int = 1) -> SamplerPool:
    return SamplerPool.model_validate(
        {
            "name": "cpu",
            "hardware": {"kind": "cpu"},
            "parallel": {"tensor": tensor},
            "dtype": dtype,
            "max_model_len": MAX_MODEL_LEN,
            "max_new_tokens": MAX_NEW_TOKENS,
        }
    )


@pytest.fixture(scope="session", autouse=True)
def _a_core_for_each_rank() -> Iterator[None]:
    """Read once, by the first engine of the process; only tensor-parallel ones heed it."""
    with pytest.MonkeyPatch.context() as environment:
        cores = sorted(os.sched_getaffinity(0))
        environment.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, cores[:2])))
        yield


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_version(tmp_path_factory.mktemp("models") / "untied")


@pytest.fixture(scope="session")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_version(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session")
def rounded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "rounded"
    return save_version(directory, dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def _untied_engine(untied: Path) -> Engine:
    engine = Engine(cpu_pool())
    engine.load(untied, 0)
    return engine


@pytest.fixture
def engine(_untied_engine: Engine, untied: Path) -> Engine:
    """A float32 engine that holds the version `untied`, whatever the test before did."""
    _untied_engine.load(untied, 0)
    return _untied_engine


@pytest.fixture(scope="session")
def tied_engine(tied: Path) -> Engine:
    engine = Engine(cpu_pool())
    engine.load(tied, 0)
    return engine


@pytest.fixture(scope="session")
def new_engine() -> Callable[..., Engine]:
    """Makes an engine of a dtype, of another kind, of some ranks, with further options of vLLM's.

    It is kept: one that is dropped takes the process groups of all the others with it.
    """
    kept = []

    def make(
        dtype: str = "float32", kind: type[Engine] = Engine, tensor: int = 1, **options: object
    ) -> Engine:
        kept.append(kind(cpu_pool(dtype, tensor), options=options))
        return kept[-1]

    return make
