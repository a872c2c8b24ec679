"""One vLLM engine for each kind of model, for the whole session: starting one takes seconds."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from tests.sampler.engine.models import LAYERS, running_engine, save_version

BLOCK_BYTES = 2 * LAYERS * 32 * 32 * 4  # keys and values, layers, tokens, head, float32
KINDS = {
    "plain": {},
    "tied": {},
    "cramped": {
        "probe": False,
        "kv_cache_memory_bytes": 14 * BLOCK_BYTES,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 16,
        "logprobs_mode": "processed_logprobs",
    },
}


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    return save_version(tmp_path_factory.mktemp("models") / "untied")


@pytest.fixture(scope="session")
def tied(tmp_path_factory):
    return save_version(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture(scope="session", autouse=True)
def engine_of(forked_engines, untied, tied):
    """Gives the engine of a kind, which holds its version, whatever the test before did. Every
    engine starts at once."""
    made = {}
    with ExitStack() as running:

        def engine(kind):
            version = tied if kind == "tied" else untied
            if kind not in made:
                made[kind] = running.enter_context(running_engine(version, **KINDS[kind]))
            made[kind].load(version, 0)
            return made[kind]

        yield engine


@pytest.fixture
def engine(engine_of):
    """A float32 engine that holds the version `untied`."""
    return engine_of("plain")


@pytest.fixture
def tied_engine(engine_of):
    """As `engine`, with a tied head."""
    return engine_of("tied")


@pytest.fixture
def cramped(engine_of):
    """As `engine`, in a cache of 14 blocks for sequences of 3: of 16 some must be preempted and
    prefilled again, in chunks. vLLM's own log-probs are of another kind, and no probe is asked for.
    What it holds in its cache is of no test before."""
    return engine_of("cramped")


@pytest.fixture
def trusted(engine, monkeypatch):
    """As `engine`, of a pool that takes over versions in the middle of rollouts."""
    pool = engine._pool.model_copy(update={"in_flight_updates": True, "trust": "trusted"})
    monkeypatch.setattr(engine, "_pool", pool)  # read at each load
    return engine
