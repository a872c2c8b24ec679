"""One vLLM engine for each kind of model, for the whole session: starting one takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
import torch

from runspec.core.spec.schema import SamplerPool
from sampler.engine.engine import Engine
from tests.sampler.engine.models import LAYERS, MAX_MODEL_LEN, MAX_NEW_TOKENS, save_version


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
def forked(forked_engines: None) -> None:
    """Every engine starts at once."""


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


@contextmanager
def running_engine(version: Path, *, probe: bool = True, **options: object) -> Iterator[Engine]:
    """A float32 engine on one rank, with options of vLLM's, that holds a version as number 0."""
    with closing(Engine(cpu_pool(), options=options, probe=probe)) as engine:
        engine.load(version, 0)
        yield engine


@pytest.fixture(scope="session")
def _untied_engine(untied: Path) -> Iterator[Engine]:
    extension = "tests.sampler.engine.quantised.QuantisedExtension"
    with running_engine(untied, worker_extension_cls=extension) as engine:
        yield engine


@pytest.fixture
def engine(_untied_engine: Engine, untied: Path) -> Engine:
    """A float32 engine that holds the version `untied`, whatever the test before did."""
    _untied_engine.load(untied, 0)
    return _untied_engine


@pytest.fixture(scope="session")
def _tied_engine(tied: Path) -> Iterator[Engine]:
    with running_engine(tied) as engine:
        yield engine


@pytest.fixture
def tied_engine(_tied_engine: Engine, tied: Path) -> Engine:
    """As `engine`, with a tied head."""
    _tied_engine.load(tied, 0)
    return _tied_engine


@pytest.fixture(scope="session")
def _cramped_engine(untied: Path) -> Iterator[Engine]:
    block_bytes = 2 * LAYERS * 32 * 32 * 4  # keys and values, layers, tokens, head, float32
    options = {
        "kv_cache_memory_bytes": 14 * block_bytes,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 16,
        "logprobs_mode": "processed_logprobs",
    }
    with running_engine(untied, probe=False, **options) as engine:
        yield engine


@pytest.fixture
def cramped(_cramped_engine: Engine, untied: Path) -> Engine:
    """As `engine`, in a cache of 14 blocks for sequences of 3: of 16 some must be preempted and
    prefilled again, in chunks. vLLM's own log-probs are of another kind, and no probe is asked for.
    What it holds in its cache is of no test before."""
    _cramped_engine.load(untied, 0)
    return _cramped_engine


@pytest.fixture
def new_engine() -> Iterator[Callable[..., Engine]]:
    """Makes an engine of a dtype, of another kind, of some ranks, with fields of the pool and
    further options of vLLM's. It ends with the test."""
    with ExitStack() as made:

        def make(
            dtype: str = "float32",
            kind: type[Engine] = Engine,
            tensor: int = 1,
            fields: dict[str, object] | None = None,
            **options: object,
        ) -> Engine:
            engine = kind(cpu_pool(dtype, tensor, **(fields or {})), options=options)
            return made.enter_context(closing(engine))

        yield make
