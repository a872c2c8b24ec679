"""Metrics files survive a kill at any byte, and no step has its lines twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from learner_jax.metrics import Clock, JsonLines
from runspec.core.errors import UserError


def steps_in(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_lines_are_appended_once_a_step(tmp_path: Path) -> None:
    # given a file with two steps, the second with two lines
    path = tmp_path / "metrics.jsonl"
    lines = JsonLines(path)
    assert lines.append(0, [{"loss": 1.0}])
    assert lines.append(1, [{"loss": 0.5}, {"loss": 0.4}])
    # when the learner starts again and replays step 1
    again = JsonLines(path)
    assert again.last_step == 1
    assert not again.append(1, [{"loss": 0.5}])
    assert again.append(2, [{"loss": 0.3}])
    # then nothing is there twice
    assert steps_in(path) == [0, 1, 1, 2]


def test_a_torn_last_line_is_dropped_wherever_it_was_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    whole = b'{"step": 0, "loss": 1.5}\n'
    torn = b'{"step": 1, "text": "' + b"x" * 70_000 + b'"}\n'
    for cut in (1, 2, 30, 66_000, len(torn) - 1):
        path.write_bytes(whole + torn[:cut])
        assert JsonLines(path).last_step == 0
        assert path.read_bytes() == whole
    path.write_bytes(torn[:40])
    assert JsonLines(path).last_step == -1
    assert path.read_bytes() == b""


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(UserError, match=r"cannot write: No space left") as caught:
        JsonLines(path).append(0, [{"loss": 1.0}])
    assert caught.value.place == str(path)


def test_a_file_that_is_not_ours_is_named_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"hello\n")
    with pytest.raises(UserError, match=r"not one of ours") as caught:
        JsonLines(path)
    assert caught.value.place == str(path)
    assert path.read_bytes() == b"hello\n"


def test_each_second_is_work_or_a_wait_for_somebody() -> None:
    # given a clock made at 10 s, and a step that waits twice for one and once for another
    moments = iter([10.0, 13.0, 14.0, 16.0, 16.5, 17.5, 21.0])
    clock = Clock(lambda: next(moments))
    clock.waited("coordinator")  # 3
    clock.trained()  # 1
    clock.waited("checkpoint")  # 2
    clock.trained()  # 0.5
    clock.waited("coordinator")  # 1
    # when taken, then every second is there once, and the next step begins with none
    assert clock.take() == (1.5, {"coordinator": 4.0, "checkpoint": 2.0})
    clock.trained()
    assert clock.take() == (3.5, {})
