"""Commands over runs: what they say and do of one that trains, is finished, killed or damaged."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from bridge.conversion import export_checkpoint, import_model
from runspec.cli.apply import LiveView, PlainView
from runspec.cli.status import status_command
from runspec.core.files import write_atomic
from runspec.core.schema.load import dump_resolved
from runspec.local.prepare import NotReady
from runspec.local.state import RoleRow, RunState
from sampler.tasks.traces import build_warm_start_data
from tests.harness import ROOT, TARGET_SHORT
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.fake_run import ZERO, prepared, small_spec, store
from tests.sampler.engine.models import save_version
from tests.waiting import eventually

pytestmark = pytest.mark.slow


def of(runs_dir: Path, command: str, *words: str) -> CompletedProcess[str]:
    return runspec(command, "small", *words, "--runs-dir", runs_dir)


def status(runs_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(of(runs_dir, "status", "--json").stdout)
    return found


def pauses(patch: pytest.MonkeyPatch, command: str, *happens: Callable[[], object]) -> None:
    """At the next pauses of a command's module something happens, and Ctrl-C comes after that."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    actions = iter([*happens, interrupted])
    # Its own pauses only: other threads, and whoever waits for a lock, sleep as ever.
    clock = SimpleNamespace(**{**vars(time), "sleep": lambda seconds: next(actions)()})
    patch.setattr(f"runspec.cli.{command}.time", clock)


@contextmanager
def started(runs_dir: Path, *extra: str) -> Iterator[subprocess.Popen[str]]:
    """A supervisor of a long run `small` of fake roles."""
    words = ("tests.runspec.local.fake_run", str(runs_dir), "100000", *extra)
    out = subprocess.PIPE if extra else subprocess.DEVNULL
    command = [sys.executable, "-m", *words]
    with subprocess.Popen(command, cwd=ROOT, stdout=out, text=True) as supervisor:
        try:
            yield supervisor
        finally:
            supervisor.terminate()


def test_a_run_that_trains_is_waited_for_described_and_paused(tmp_path):
    with started(tmp_path) as supervisor:
        eventually((tmp_path / "small" / "metrics.jsonl").exists, "a first step")
        # its conditions can be waited for
        for awaited in ("Ready", "condition=Training", "step=3", "Finished=false"):
            assert of(tmp_path, "wait", "--for", awaited, "--timeout", "10m").returncode == 0
        late = of(tmp_path, "wait", "--for", "Finished", "--timeout", "0.1s")
        assert late.returncode == 1 and "small is running" in late.stderr
        assert "waited for Finished: not within 0.1 s" in late.stderr
        # and status names its holder, its steps and the process of each role
        seen = status(tmp_path)
        assert (seen["state"], seen["steps"]) == ("running", 100_000) and seen["step"] >= 3
        assert set(seen["roles"]) == {"server", "learner", "worker"}
        for role in seen["roles"].values():
            os.kill(role["pid"], 0)
        shown, described = of(tmp_path, "status").stdout, of(tmp_path, "describe").stdout
        assert "small: running" in shown
        for words in ("held by process", "learner"):
            assert words in shown and words in described
        assert "budget.max_hours" in described and "Events" in described
        assert "starts at step 0" in of(tmp_path, "logs", "--role", "learner").stdout
        assert "learner | " in of(tmp_path, "logs").stdout
        # and it cannot be touched
        for words in (("resume",), ("rollback", "--to", "0", "--yes"), ("delete", "--yes")):
            refused = of(tmp_path, *words)
            assert refused.returncode == 5 and "the run is alive" in refused.stderr
            assert f"`runspec pause {tmp_path / 'small'}`" in refused.stderr
        # when it is paused, then every role has ended in order and the state says so
        assert of(tmp_path, "pause").returncode == 0
        supervisor.communicate()
    seen = status(tmp_path)
    assert (seen["state"], seen["held_by"]) == ("paused", None)
    assert {role["state"] for role in seen["roles"].values()} == {"stopped"}
    conditions = {each["type"]: each["status"] for each in seen["conditions"]}
    assert (conditions["Paused"], conditions["Alive"]) == ("True", "False")
    with closing(RunState(tmp_path / "small")) as state:
        last = [event.role for event in state.events() if event.exit_code is not None]
    assert last[-1] == "server", "servers go last"
    # and pausing it again changes nothing
    assert "not alive: paused" in of(tmp_path, "pause").stdout
    assert of(tmp_path, "wait", "--for", "Paused").returncode == 0


def test_a_run_that_loads_is_watched_killed_and_deleted(tmp_path, capfd):
    # given a run whose sampler loads its engine
    hold = tmp_path / "small" / "hold"
    hold.parent.mkdir()
    hold.touch()
    with started(tmp_path, "loading") as supervisor:
        # then the terminal says so, and so does status, until the engine is there
        lines = iter(supervisor.stdout.readline, "")
        assert any(line.endswith(" loading: loading vLLM\n") for line in lines)
        loading = {"state": "running", "stage": "loading vLLM"}.items()
        eventually(lambda: loading <= status(tmp_path)["roles"]["loading"].items(), "its stage")
        assert "starting" in of(tmp_path, "logs", "--role", "worker").stdout
        with pytest.MonkeyPatch.context() as patch:
            pauses(patch, "status", lambda: None)
            with pytest.raises(KeyboardInterrupt):
                status_command("small", watch=True, runs_dir=tmp_path)
        assert capfd.readouterr().out.count("running, loading vLLM") == 2
        hold.unlink()
        eventually(lambda: not status(tmp_path)["roles"]["loading"]["stage"], "the end of the load")
        supervisor.kill()
        supervisor.communicate()

    def states() -> set[str]:
        seen = status(tmp_path)
        return {seen["state"], *(role["state"] for role in seen["roles"].values())}

    # and it is interrupted, its roles ended once the kernel has ended them
    eventually(lambda: states() == {"interrupted", "ended"}, "the end of the supervisor")
    # and it is deleted, after a question
    assert of(tmp_path, "delete").returncode == 1 and (tmp_path / "small").exists()
    assert of(tmp_path, "delete", "--yes").returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_a_finished_run_says_so_to_everyone(finished):
    assert of(finished, "wait", "--for", "Finished").returncode == 0
    # whoever waits for what cannot come any more is told at once
    for awaited, why in (("Ready", "the run is finished"), ("step=6", "the run has 5 steps")):
        never = of(finished, "wait", "--for", awaited)
        assert never.returncode == 1 and why in never.stderr
    never = of(finished, "wait", "--for", "Ready", "--timeout", "soon")
    assert never.returncode == 2 and "'--timeout': a duration with a unit was" in never.stderr
    # and whoever would go on or stop it
    for command, words in (("resume", "is finished: all 5 steps"), ("pause", "alive: finished")):
        done = of(finished, command)
        assert done.returncode == 0 and words in done.stdout


def test_a_folder_of_runs_is_a_table_with_a_damaged_run_as_a_row_and_a_page(finished, tmp_path):
    # given a finished run that was evaluated, a damaged one, and a folder that is no run
    shutil.copytree(finished / "small", tmp_path / "small")
    store(tmp_path / "small", ZERO)
    write_atomic(tmp_path / "broken" / "spec.json", b"{}")
    (tmp_path / "notes").mkdir()
    # when they are listed, then the figures are there and the damaged file is named
    found = json.loads(runspec("list", "--runs-dir", tmp_path, "--json").stdout)
    assert [(row["run"], row["state"]) for row in found] == [
        ("small", "finished"),
        ("broken", "damaged"),
    ]
    assert {"step": 5, "steps": 5, "held_out": 0.25, "error": None}.items() <= found[0].items()
    head, small, broken, error, *_ = runspec("list", tmp_path).stdout.splitlines()
    assert head.split()[:2] == ["run", "state"] and max(map(len, (head, small, broken))) <= 80
    assert small.split()[:3] == ["small", "finished", "5/5"] and "0.25" in small
    place = tmp_path / "broken" / "spec.json"
    assert error.startswith(f"broken: {place}: not a resolved run spec: version: Field required; ")
    # and the page of the folder has those that can be read
    page = tmp_path / "page.html"
    assert runspec("dashboard", tmp_path, "--export", page).stdout == f"{page}: small\n"
    for words in (("list", tmp_path / "none"), ("dashboard", tmp_path / "notes")):
        assert runspec(*words).returncode == 1


def test_events_and_logs_are_followed_as_they_come(finished, monkeypatch):
    # given someone who follows, an event that comes meanwhile, and Ctrl-C after it
    def add_event() -> None:
        with closing(RunState(finished / "small")) as state:
            state.add_event("run", "one more")

    pauses(monkeypatch, "runs", add_event)
    events = [
        json.loads(line) for line in of(finished, "events", "-f", "--json").stdout.split("\n")[:-1]
    ]
    # then each event was printed once, the late one last
    assert len({event["id"] for event in events}) == len(events)
    assert events[-1]["text"] == "one more"
    # and so is a line of a log
    log = finished / "small" / "logs" / "late.log"
    log.write_text("one\n")
    pauses(monkeypatch, "runs", lambda: log.write_text("one\ntwo\n"))
    assert of(finished, "logs", "--role", "late", "-f").stdout == "one\ntwo\n"


def test_the_ends_of_logs_are_printed(finished):
    lines = [f"line {number}\n" for number in range(9000)]
    (finished / "small" / "logs" / "long.log").write_text("".join(lines))
    for tail, count in ((("--tail", "2"), 2), (("--tail", "0"), 0), ((), 9000)):
        out = of(finished, "logs", "--role", "long", *tail).stdout
        assert out == "".join(lines[9000 - count :])


def test_a_run_that_was_renamed_is_not_resumed(finished, tmp_path):
    shutil.copytree(finished / "small", tmp_path / "other")
    done = runspec("resume", "other", "--runs-dir", tmp_path)
    assert done.returncode == 1
    assert "by its spec this run is called small" in done.stderr


def test_full_states_that_lie_elsewhere_stay_and_are_named(tmp_path):
    # given a run that keeps its full states on another disk
    states, runs = tmp_path / "disk" / "small" / "state", tmp_path / "runs"
    (states / "step_2").mkdir(parents=True)
    spec = small_spec("small", 5, f"checkpoints.dir={tmp_path / 'disk'}")
    write_atomic(runs / "small" / "spec.json", dump_resolved(spec))
    # when it is deleted, then they are there, and a new run of its name is refused
    assert f"stay in {states.parent}:" in of(runs, "delete", "--yes").stdout
    assert (states / "step_2").is_dir()
    with pytest.raises(NotReady, match="full states of an earlier run"):
        prepared(spec, runs).__enter__()
    assert not (runs / "small").exists()


def test_a_damaged_run_can_be_deleted(tmp_path):
    # given a run whose spec and state nobody can read
    for name in ("spec.json", "state.db"):
        write_atomic(tmp_path / "small" / name, b"neither JSON nor a database")
    # when it is deleted, then it is gone, and what could not be looked at is said
    done = of(tmp_path, "delete", "--yes")
    assert (done.returncode, list(tmp_path.iterdir())) == (0, [])
    assert "full states outside the run are not known" in done.stderr
    assert "roles that may still be alive are not known" in done.stderr


@pytest.fixture
def trained(finished, tmp_path):
    """The folder of a finished run `small`, with a version that the bridge exported."""
    shutil.copytree(finished, tmp_path / "runs")
    initial = save_version(tmp_path / "initial")
    build_warm_start_data(small_spec()).write_tokenizer(initial)
    import_model(initial, tmp_path / "v5" / "params")
    version = tmp_path / "runs" / "small" / "weights" / "v5"
    export_checkpoint(tmp_path / "v5" / "params", version, model_dir=initial, dtype="float32")
    return tmp_path / "runs"


def test_a_finished_run_has_lines_that_load_its_model(trained):
    """Those for transformers are the model card's, which test_run_dir.py runs."""
    # given a finished run, whose model's directory is named, and nothing is missing in it
    folder = trained / "small" / "weights" / "v5"
    described = of(trained, "describe").stdout
    assert f"version 5, the last, as a Hugging Face directory: {folder}" in described
    assert "it has no" not in described and "damaged" not in described
    assert f'vLLM: from vllm import LLM; model = LLM("{folder}")' in described
    assert (
        "transformers: from transformers import AutoModelForCausalLM, AutoTokenizer; "
        f'tokenizer = AutoTokenizer.from_pretrained("{folder}"); '
        f'model = AutoModelForCausalLM.from_pretrained("{folder}")\n'
    ) in described


def test_the_end_of_a_run_names_the_model_and_what_is_missing(trained):
    folder = trained / "small" / "weights" / "v5"
    (folder / "tokenizer.json").unlink()
    (folder / "model.safetensors").write_bytes(b"cut off")
    said = of(trained, "resume").stdout.partition("Trained model: ")[2].splitlines()
    # and the last three lines name the page, how to talk to it, and how to export it
    run = trained / "small"
    assert said[-3].startswith(f"Report: {run / 'report.html'}")
    assert said[-2:] == [
        f"Talk to it: runspec chat {run}",
        f"Export it: runspec export {run} small-model",
    ]
    assert said[0].startswith("version 5")
    assert said[1].startswith(f"  it is damaged: {folder / 'model.safetensors'}")
    assert said[2] == "  it has no tokenizer.json"
    # and before the end, it is the newest version that is out
    (folder.parent / "v5").rename(folder.parent / "v3")
    store = trained / "small" / "store/origin/small/versions"
    write_atomic(store / "3" / "manifest.json", b"{}")
    folder.mkdir()
    shutil.rmtree(store / "5")
    assert "version 3, the newest published of 5, as" in of(trained, "describe").stdout
    # and without a version there is none
    shutil.rmtree(store)
    assert "Trained model\n  none" in of(trained, "describe").stdout


ROW = {"step": 11, "task_reward": 0.4567, "reward": -0.2, "length_error": 7.89, "lag_mean": 1.25,
       "lag_max": 2, "tokens_per_s": 4000.0, "sampler_tokens_per_s": 8123.4}  # fmt: skip
WAITING = RoleRow("relay-eu", "backoff", 3, None, None, 0.0)
ROLES = [RoleRow("learner", "running", 0, 41, 7, 0.0), WAITING]


def test_plain_lines_say_every_change_but_not_every_step(monkeypatch):
    out, clock = io.StringIO(), {**vars(time), "monotonic": lambda: 1000.0}
    monkeypatch.setattr("runspec.cli.apply.time", SimpleNamespace(**clock))
    view = PlainView(150, out)
    view.event("learner", "starting (process 41)")
    for step in range(40):
        view.show([{**ROW, "step": step}], ROLES, "")
    lines = out.getvalue().splitlines()
    assert lines[0].endswith("learner: starting (process 41)")
    assert len(lines) == 2, "forty steps at once are one line"
    view.show([{**ROW, "step": 149}], ROLES, "")
    assert "step 150/150" in out.getvalue(), "the last step is always said"


def test_the_live_panel_shows_the_run_and_each_role():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with Live(console=console, auto_refresh=False) as live:
        view = LiveView("small", 150, live)
        view.show([], ROLES, "warm start: update 10")
        view.event("relay-eu", "killed by SIGKILL, starts again")
        view.event("evaluator", "held-out of version 8: mean 0.5", "result")
        for _ in range(4):  # others push the event out
            view.event("learner", "starts again")
        view.show([{**ROW, "step": n, "time": 100.0 + 2 * n} for n in range(12)], ROLES, "")
    for text in ("warm start: update 10", "12/150", "0.457", "8,123", "relay-eu", "backoff", "41"):
        assert text in out.getvalue()
    # and the newest evaluation, and the time that is left
    assert "held-out of version 8: mean 0.5" in out.getvalue()
    assert "about 4 min 36 s left" in out.getvalue()


@pytest.fixture
def unread():
    """A pipe whose reader has gone, as of `runspec ... | head -0`."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("lint", TARGET_SHORT, "--set", "optimizer.lr=fast"), 1),
        (("events", "small", "-f", "--runs-dir", "RUNS"), 0),
    ],
)
def test_a_command_whose_reader_goes_ends_quietly_by_its_own_code(finished, unread, words, code):
    arguments = [str(finished) if word == "RUNS" else str(word) for word in words]
    command = [sys.executable, "-m", "runspec", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=unread, stderr=subprocess.PIPE)
    assert done.returncode == code
    assert b"Error" not in done.stderr, "neither a traceback nor Python's word at exit"
