"""TensorBoard's own reader finds in the event files what the run directory has."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import (
    SCALARS,
    TENSORS,
    EventAccumulator,
)

from tests.runspec.local.monitors.logged_run import KEYS, STEPS, LoggedRun, row


def read(run: LoggedRun, folder: Path | None = None) -> EventAccumulator:
    """Return the newest record, every event of it."""
    newest = max((folder or run.folder).glob("small-*"), key=lambda path: path.stat().st_ctime_ns)
    return EventAccumulator(str(newest), size_guidance={SCALARS: 0, TENSORS: 0}).Reload()


def require_all(found: EventAccumulator, count: int, *, attempt: int = 1) -> None:
    """Each figure of each step is there once, in order, with its time."""
    for i in range(KEYS):
        events = found.Scalars(f"figure_{i}")
        assert [event.step for event in events] == list(range(count))
        values = [np.float32(row(step, attempt)[f"figure_{i}"]) for step in range(count)]
        assert [np.float32(event.value) for event in events] == values
    assert [event.wall_time for event in events] == [1.7e9 + step for step in range(count)]
    assert {event.value for event in found.Scalars("waits/coordinator")} == {0.5}
    assert "waits/input" not in found.Tags()["scalars"]


def text(found: EventAccumulator, tag: str) -> dict[int, str]:
    return {event.step: event.tensor_proto.string_val[0].decode() for event in found.Tensors(tag)}


def test_event_files_have_steps_evaluations_rollouts_and_the_spec(tmp_path: Path) -> None:
    # given a run that is over, and a folder for its event files
    run = LoggedRun(tmp_path / "run", f"kind: tensorboard, dir: {tmp_path / 'board'}")
    run.train(range(STEPS))
    run.evaluate(0, 10, STEPS)
    # when a monitor sends it
    run.follow()
    # then TensorBoard reads all of it
    found = read(run, tmp_path / "board")
    require_all(found, STEPS)
    for figure, value in {"mean": 0.25, "mean/low": 0.2, "mean/high": 0.3}.items():
        events = found.Scalars(f"evaluations/held-out/{figure}")
        assert [event.step for event in events] == [0, 10, STEPS]
        assert {np.float32(event.value) for event in events} == {np.float32(value)}
    rollouts = text(found, "rollouts")
    assert list(rollouts) == [0, 10, 20]
    # and what the model wrote stands in blocks of code, where it is no Markdown
    assert "    # spell\n    *cat*\n\n    tac<eos>" in rollouts[10]
    spec = "".join(line.removeprefix("    ") for line in text(found, "spec")[0].splitlines(True))
    assert json.loads(spec)["name"] == "small"


@pytest.mark.slow
def test_killed_processes_leave_no_gap_and_no_double(tmp_path: Path) -> None:
    # given a run of many steps, and monitors that are killed while they send
    count = 800
    run = LoggedRun(tmp_path / "run", "kind: tensorboard")
    run.train(range(count))
    run.evaluate(0, 10)
    for entries in (1, 250, 600):
        run.kill_at(entries)
    # when one may work to its end
    run.end()
    # then each figure is there once
    found = read(run)
    require_all(found, count)
    assert [event.step for event in found.Scalars("evaluations/held-out/mean")] == [0, 10]
    assert list(text(found, "rollouts")) == list(range(0, count, 10))


@pytest.mark.parametrize("torn", [1, 20, 200])
def test_an_event_that_a_crash_left_torn_is_written_again(tmp_path: Path, torn: int) -> None:
    run = LoggedRun(tmp_path / "run", "kind: tensorboard")
    run.train(range(12))
    run.follow()
    [path] = run.folder.glob("small-*/events*")
    whole = path.read_bytes()
    path.write_bytes(whole[:-torn])
    run.follow()
    assert path.read_bytes() == whole


def test_a_file_without_its_head_begins_anew(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path / "run", "kind: tensorboard")
    run.train(range(12))
    run.follow()
    [path] = run.folder.glob("small-*/events*")
    whole = path.read_bytes()
    path.write_bytes(whole[:50])
    run.follow()
    assert path.read_bytes() == whole


def test_a_rolled_back_run_has_a_second_record(tmp_path: Path) -> None:
    run = LoggedRun(tmp_path / "run", "kind: tensorboard")
    run.train(range(12))
    run.follow()
    run.roll_back(0)
    run.train(range(15), attempt=2)
    run.follow()
    assert len(list(run.folder.glob("small-*"))) == 2
    require_all(read(run), 15, attempt=2)
