"""Saves in the background: one at a time, waited for, and never failing in silence."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

import pytest

from learner_jax import saver as saver_module
from learner_jax.saver import Saver
from runspec.core.errors import UserError

LOG = logging.getLogger("test")
FULL = UserError("cannot write a checkpoint: disk full", place="step_2")


def failing() -> None:
    raise FULL


def test_the_next_save_begins_when_the_one_before_is_written() -> None:
    written: list[str] = []
    allowed = threading.Event()

    def begin(name: str, wait: bool) -> Callable[[], None]:
        written.append(f"begin {name}")

        def finish() -> None:
            assert not wait or allowed.wait(30)
            written.append(f"finish {name}")

        return finish

    with Saver(LOG) as saver:
        # given a save that is being written
        saver.run("a", lambda: begin("a", wait=True))
        assert written == ["begin a"]
        # when another is asked for, then it begins after the first
        allowed.set()
        saver.run("b", lambda: begin("b", wait=False))
    # and leaving waits for it
    assert written == ["begin a", "finish a", "begin b", "finish b"]


def test_a_failed_save_is_raised_at_the_next_wait_or_at_the_end() -> None:
    with Saver(LOG) as saver:
        saver.run("a state", lambda: failing)
        with pytest.raises(UserError, match="disk full"):
            saver.wait()
        saver.wait()  # told once
    with pytest.raises(UserError, match="disk full"), Saver(LOG) as saver:
        saver.run("a state", lambda: failing)


def test_an_error_is_not_hidden_by_that_of_a_save(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(UserError, match="no batch"), Saver(LOG) as saver:
        saver.run("a state", lambda: failing)
        raise UserError("no batch")
    assert "disk full" in caplog.text


def test_a_save_past_its_deadline_is_named_and_not_waited_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # given a save that does not end, and little patience
    monkeypatch.setattr(saver_module, "REPORT_EVERY_S", 0.01)
    monkeypatch.setattr(saver_module, "DEADLINE_S", 0.02)
    ended = threading.Event()

    def never_ending() -> None:
        assert ended.wait(60)

    try:
        # when it is waited for, then the error names it, and leaving does not wait once more
        with pytest.raises(UserError, match="a state is not written after"), Saver(LOG) as saver:
            saver.run("a state", lambda: never_ending)
            saver.wait()
        saver.wait()
    finally:
        ended.set()
