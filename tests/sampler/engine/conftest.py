"""One vLLM engine for each kind of model, for the whole session: starting one takes seconds."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch

from runspec.spec.schema import SamplerPool
from sampler.engine.engine import Engine
from tests.sampler.engine.models import MAX_MODEL_LEN, MAX_NEW_TOKENS, save_version


def cpu_pool(dtype: str = "float32", tensor: int = 1, **fields: object) -> SamplerPool:
    return SamplerPool.model_validate(
        {
            "name": "cpu",
            "hardware": {"kind": "cpu"},
            "parallel": {"tensor": tensor},
            "dtype": dtype,
            "max_model_len": MAX_MODEL_LEN,
            "max_new_tokens": MAX_NEW_TOKENS,
            **fields,
        }
    )


@pytest.fixture(scope="session", autouse=True)
def _threads() -> Iterator[None]:
    """Of the processes that engines start."""
    with pytest.MonkeyPatch.context() as environment:
        cores = sorted(os.sched_getaffinity(0))
        # Threads that wait for each other on a busy core, at every operator, cost a hundredfold.
        environment.setenv("OMP_NUM_THREADS", "1")
        # Only tensor-parallel engines heed it.
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
def _untied_engine(untied: Path) -> Iterator[Engine]:
    extension = "tests.sampler.engine.quantised.QuantisedExtension"
    with closing(Engine(cpu_pool(), options={"worker_extension_cls": extension})) as engine:
        engine.load(untied, 0)
        yield engine


@pytest.fixture
def engine(_untied_engine: Engine, untied: Path) -> Engine:
    """A float32 engine that holds the version `untied`, whatever the test before did."""
    _untied_engine.load(untied, 0)
    return _untied_engine


@pytest.fixture(scope="session")
def tied_engine(tied: Path) -> Iterator[Engine]:
    with closing(Engine(cpu_pool())) as engine:
        engine.load(tied, 0)
        yield engine


@pytest.fixture
def new_engine() -> Iterator[Callable[..., Engine]]:
    """Makes an engine of a dtype, of another kind, of some ranks, with fields of the pool and
    further options of vLLM's. It ends with the test."""
    made: list[Engine] = []

    def make(
        dtype: str = "float32",
        kind: type[Engine] = Engine,
        tensor: int = 1,
        fields: dict[str, object] | None = None,
        **options: object,
    ) -> Engine:
        made.append(kind(cpu_pool(dtype, tensor, **(fields or {})), options=options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
