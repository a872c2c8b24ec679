"""A run that a real supervisor drives, seen and acted on by the commands over runs."""

from __future__ import annotations

import json
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from runspec.cli.lifecycle import delete_command, pause_command, resume_command, rollback_command
from runspec.cli.logs import events_command, logs_command
from runspec.cli.status import describe_command, read_status
from runspec.cli.wait import wait_command
from runspec.core.errors import BadUsage, UserError
from runspec.core.files import write_atomic
from runspec.core.spec.resolved import dump_resolved
from runspec.local.prepare import NotReady
from runspec.local.run_dir import RunLocked
from runspec.local.state import RunState
from tests.runspec.local.fake_run import prepared, small_spec


def test_a_run_is_waited_for_described_and_paused(
    alive: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a run that trains: its conditions can be waited for
    for awaited in ("Ready", "condition=Training", "step=3", "Finished=false"):
        assert wait_command("small", awaited, 30.0, alive) == 0
    assert wait_command("small", "Finished", 0.1, alive) == 1
    error = capsys.readouterr().err
    assert "waited for Finished: not within 0.1 s" in error
    assert "small is running" in error
    # and described
    assert describe_command("small", alive) == 0
    described = capsys.readouterr().out
    for words in ("held by process", "Ready", "learner", "budget.max_hours", "Events"):
        assert words in described
    # and it can be neither resumed nor taken back
    with pytest.raises(RunLocked):
        resume_command("small", False, alive)
    with pytest.raises(RunLocked):
        rollback_command("small", 0, True, alive)
    # when it is paused
    assert pause_command("small", alive) == 0
    # then every role has ended in order and the state says so
    status = read_status(alive / "small")
    assert (status["state"], status["held_by"]) == ("paused", None)
    conditions = {each["type"]: each["status"] for each in status["conditions"]}
    assert (conditions["Paused"], conditions["Alive"]) == ("True", "False")
    with closing(RunState(alive / "small")) as state:
        last = [event.role for event in state.events() if event.text.startswith("ended")]
    assert last[-1] == "server", "servers go last"
    # and pausing it again changes nothing
    assert pause_command("small", alive) == 0
    assert "not alive: paused" in capsys.readouterr().out
    assert wait_command("small", "Paused", 1.0, alive) == 0


def test_a_finished_run_says_so_to_everyone(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert wait_command("small", "Finished", 1.0, finished) == 0
    # whoever waits for what cannot come any more is told at once
    assert wait_command("small", "Ready", 600.0, finished) == 1
    assert "the run is finished" in capsys.readouterr().err
    assert wait_command("small", "step=6", 600.0, finished) == 1
    assert "the run has 5 steps" in capsys.readouterr().err
    # and whoever would go on or stop it
    assert resume_command("small", False, finished) == 0
    assert "is finished: all 5 steps" in capsys.readouterr().out
    assert pause_command("small", finished) == 0
    assert "not alive: finished" in capsys.readouterr().out


def test_events_are_followed_as_they_come(
    finished: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # given someone who follows, an event that comes meanwhile, and Ctrl-C after it
    pauses = iter([lambda: add_event(finished / "small", "one more"), raise_interrupt])
    monkeypatch.setattr("time.sleep", lambda seconds: next(pauses)())
    assert events_command("small", True, True, finished) == 0
    # then each event was printed once, the late one last
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len({event["id"] for event in events}) == len(events)
    assert events[-1]["text"] == "one more"


def add_event(run_dir: Path, text: str) -> None:
    with closing(RunState(run_dir)) as state:
        state.add_event("run", text)


def raise_interrupt() -> None:
    raise KeyboardInterrupt


def test_the_ends_of_logs_are_printed(
    finished: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    log = finished / "small" / "logs" / "long.log"
    log.write_bytes(b"".join(b"line %d\n" % number for number in range(9000)))
    assert logs_command("small", "long", False, 2, finished) == 0
    assert capfdbinary.readouterr().out == b"line 8998\nline 8999\n"
    assert logs_command("small", "long", False, 0, finished) == 0
    assert capfdbinary.readouterr().out == b""
    assert logs_command("small", "long", False, None, finished) == 0
    assert len(capfdbinary.readouterr().out.splitlines()) == 9000


def test_bad_words_are_bad_usage(finished: Path) -> None:
    with pytest.raises(BadUsage, match=r"did you mean Finished\?"):
        wait_command("small", "Finsihed", 600.0, finished)


def test_a_run_that_was_renamed_is_not_resumed(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "small", tmp_path / "other")
    with pytest.raises(UserError, match="by its spec this run is called small"):
        resume_command("other", False, tmp_path)


def test_full_states_that_lie_elsewhere_stay_and_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a run that keeps its full states on another disk
    states = tmp_path / "disk" / "small" / "state"
    (states / "step_2").mkdir(parents=True)
    spec = small_spec("small", 5, f"checkpoints.dir={tmp_path / 'disk'}")
    write_atomic(tmp_path / "runs" / "small" / "spec.json", dump_resolved(spec))
    # when it is deleted
    assert delete_command("small", True, tmp_path / "runs") == 0
    # then they are there, and a new run of its name is refused
    assert (states / "step_2").is_dir()
    assert f"stay in {states.parent}:" in capsys.readouterr().out
    with pytest.raises(NotReady, match="full states of an earlier run"):
        prepared(spec, tmp_path / "runs").__enter__()
    assert not (tmp_path / "runs" / "small").exists()


def test_a_damaged_run_can_be_deleted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # given a run whose spec and state nobody can read
    for name in ("spec.json", "state.db"):
        write_atomic(tmp_path / "small" / name, b"neither JSON nor a database")
    # when it is deleted, then it is gone, and what could not be looked at is said
    assert delete_command("small", True, tmp_path) == 0
    assert list(tmp_path.iterdir()) == []
    said = capsys.readouterr().err
    assert "full states outside the run are not known" in said
    assert "roles that may still be alive are not known" in said
