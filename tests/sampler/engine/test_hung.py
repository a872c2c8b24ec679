"""An engine core that hangs while outputs are awaited: it is given up, by name, and replaced."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sampler.engine import engine_process
from sampler.engine.engine import Engine, EngineDied
from tests.processes import alive
from tests.sampler.engine.requests import WAIT_S, batch

pytestmark = pytest.mark.slow
ASK_S, SILENCE_S = 0.05, 8.0


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watchdog that asks often and waits little."""
    monkeypatch.setattr(engine_process, "ASK_S", ASK_S)
    monkeypatch.setattr(engine_process, "SILENCE_S", SILENCE_S)


def test_a_core_that_hangs_fails_what_is_under_way_and_a_load_starts_another(
    soon: None, new_engine: Callable[..., Engine], untied: Path
) -> None:
    # given an engine at work
    engine = new_engine()
    engine.load(untied, 0)
    expected = engine.submit(batch()).result(WAIT_S)
    [core] = engine.pids
    futures = [engine.submit(batch(16, 16)), engine.submit(batch(2, 2))]
    # when its core stops answering
    os.kill(core, signal.SIGSTOP)
    # then everything under way says who did not answer, for how long, and the core is gone
    for future in futures:
        with pytest.raises(EngineDied, match=f"did not answer within 8 s: .* process {core}"):
            future.result(WAIT_S)
    assert (engine.version, engine.running) == (None, 0)
    assert not alive(core)
    # and the next load starts another one, which samples the same
    engine.load(untied, 1)
    assert engine.pids != [core]
    again = engine.submit(batch()).result(WAIT_S)
    assert [r.output_tokens.tolist() for r in again] == [r.output_tokens.tolist() for r in expected]


def test_a_core_that_is_slow_but_answers_is_left_alone(
    soon: None, new_engine: Callable[..., Engine], untied: Path
) -> None:
    # given an engine at work, asked for signs of life
    engine = new_engine()
    engine.load(untied, 0)
    [core] = engine.pids
    future = engine.submit(batch(16, 16))
    # when it stands still again and again, each time for less than the bound, together for more
    for _ in range(3):
        os.kill(core, signal.SIGSTOP)
        time.sleep(0.4 * SILENCE_S)
        assert not future.done()
        os.kill(core, signal.SIGCONT)
        engine.prompt_logprobs([[2, 3]])  # what was asked before is answered before
    # then it finishes its work
    assert len(future.result(WAIT_S)) == 256
    assert engine.pids == [core]
