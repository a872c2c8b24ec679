"""What a run directory says: its holder, state, logs, progress, conditions, budget, an export."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from bridge.__main__ import main as bridge
from bridge.publisher import Publisher
from runspec.cli import app
from runspec.cli.output import exit_code_of
from runspec.cli.wait import Awaited, holds, parse_awaited, why_never
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.run_files import weights_folder
from runspec.core.spec.schema import Budget, RunSpec
from runspec.estimate.price import hourly_price
from runspec.local import run_dir
from runspec.local.backend import backend
from runspec.local.budget import Limit, left_s, limits
from runspec.local.conditions import Condition, condition, conditions, late_after_s
from runspec.local.export import export_version
from runspec.local.fleet import Reached
from runspec.local.progress import RunProgress, StageProgress
from runspec.local.role_logs import RoleError, last_error
from runspec.local.run_dir import (
    RunLocked,
    find_run,
    hold,
    holder,
    note_site,
    read_site,
    run_directory,
)
from runspec.local.snapshot import Snapshot
from runspec.local.state import EventRow, RoleRow, RunRow, RunState, SessionRow
from tests.bridge.test_publisher import add_version
from tests.learner_jax.conftest import Run, tiny_spec, write_initial_model
from tests.runspec.local.fake_run import ZERO, prepared, small_spec, store

pytestmark = pytest.mark.slow


def test_a_held_run_names_its_holder_and_is_free_afterwards(tmp_path: Path) -> None:
    assert holder(tmp_path) is None
    with hold(tmp_path):
        assert f"process {os.getpid()} on" in str(holder(tmp_path))
        with pytest.raises(RunLocked, match=f"held by process {os.getpid()}"), hold(tmp_path):
            pytest.fail("held twice")
    assert holder(tmp_path) is None
    with hold(tmp_path):
        pass


def test_a_run_is_found_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "spec.json").write_text("{}")
    assert find_run("mine", tmp_path) == tmp_path / "mine"
    assert find_run(str(tmp_path / "mine"), tmp_path / "elsewhere") == tmp_path / "mine"
    with pytest.raises(UserError, match="one of: mine"):
        find_run("yours", tmp_path)
    # and it lies where the command line says, else the spec, else under runs/
    plain, stored = small_spec(), small_spec("small", 5, f"storage.dir={tmp_path / 'stored'}")
    assert run_directory(plain, None) == Path("runs/small").absolute()
    assert run_directory(stored, None) == tmp_path / "stored" / "small"
    assert run_directory(stored, tmp_path / "said") == tmp_path / "said" / "small"
    # and a folder that cannot be made is named
    opened = prepared(small_spec(), tmp_path / "mine" / "spec.json")
    with pytest.raises(UserError, match="directory cannot be written: Not a directory"), opened:
        pytest.fail("opened in a file")


READ = (
    "import os, sys; from pathlib import Path; from runspec.local.state import RunState\n"
    "os.setuid(65534); print(RunState(Path(sys.argv[1])).run().name)"
)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("alive", [False, True])
def test_another_user_reads_a_run_that_he_may_not_write(alive: bool) -> None:
    # given a run of root's, in a folder that others may look into
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        with closing(RunState(folder)) as state:
            state.begin("mine", "digest", 3)
            if not alive:
                state.close()
            for file in folder.iterdir():
                file.chmod(0o644)
            # when nobody in particular looks at it
            command = [sys.executable, "-c", READ, name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
    # then he is told
    assert done.stdout.strip() == "mine", done.stderr


def test_damaged_files_are_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"no database" * 1000)
    with pytest.raises(UserError, match="not a database") as error:
        RunState(tmp_path)
    assert "runspec delete" in error.value.remedy
    (tmp_path / "site.json").write_text("{")
    with pytest.raises(UserError, match=r"site\.json: cannot be read"):
        read_site(tmp_path)
    with pytest.raises(UserError, match=r"no backend 'slurp'; there is local, .*ray"):
        backend("slurp")


class FakeBackend:
    """Notes what is carried to it."""

    def __init__(self) -> None:
        self.carried: list[str] = []
        self.code = 0

    def command(self, site: Mapping[str, str], arguments: Sequence[str]) -> int:
        self.carried = list(arguments)
        if self.code == 130:
            raise KeyboardInterrupt
        return self.code


def test_a_command_on_a_run_of_another_machine_is_carried_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    note_site(tmp_path / "runs" / "far", {"backend": "fake", "run": "far", "address": "x"})
    there = FakeBackend()
    monkeypatch.setattr(run_dir, "backend", {"fake": there}.__getitem__)
    monkeypatch.chdir(tmp_path)

    def command(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["runspec", *words])
        try:
            return exit_code_of(app)
        except SystemExit as end:  # of a command that ends here
            return int(str(end.code))

    # when a command names the run, by its name or by its folder here, then it names the run there
    for named in ("far", "runs/far"):
        assert command("logs", named, "--role", "learner") == 0
        runs = ["--runs-dir", str(tmp_path / "runs")]
        assert there.carried == ["logs", "far", "--role", "learner", *runs]
    there.code = 130
    assert command("logs", "far") == 130
    assert capsys.readouterr().err == "interrupted\n"
    # and delete takes the note along, unless it was refused
    for there.code, left in ((5, True), (0, False)):
        assert command("delete", "far", "--yes") == there.code
        assert (tmp_path / "runs" / "far").exists() == left


STARTED = "--- 2026-01-01 10:00:00 starting: python -m verify validator\n"
AT = "2026-01-01 10:00:01,000"
ERROR = f"{AT} E validator reward.r: it broke\n  remedy: mend it\n"
BROKE, GOLD = RoleError("reward.r: it broke", "mend it"), RoleError("KeyError: 'gold'")
TRACEBACK = """\
Traceback (most recent call last):
  File "mine.py", line 3, in load

ValueError: odd

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "mine.py", line 9, in <module>
KeyError: 'gold'
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", None),
        (f"{STARTED}{AT} I validator working\n", None),
        (ERROR, BROKE),
        (f"{ERROR}{AT} I x ends\n", BROKE),
        (f"{AT} E sampler near no room\n", RoleError("no room")),
        (ERROR + TRACEBACK, GOLD),
        (f"{AT} E x internal error\n{TRACEBACK}", GOLD),
        (ERROR + STARTED, None),
        (f"{AT} E x a\x1b[2Jb{'c' * 9000}", RoleError("a?[2Jb" + "c" * 794)),
    ],
)
def test_the_last_error_since_the_last_start_is_found(
    tmp_path: Path, text: str, found: RoleError | None
) -> None:
    log = tmp_path / "validator-0.log"
    assert last_error(log) is None
    log.write_text(text)
    assert last_error(log) == found


def test_files_become_events_as_they_appear(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, small_spec("small", 2), "http://127.0.0.1:9")
    metrics = tmp_path / "metrics.jsonl"
    assert progress.poll() == Reached()
    metrics.write_text('{"step": 0}\n')
    assert [progress.poll(), progress.poll()] == [Reached(stepped=True), Reached()]
    write_atomic(tmp_path / "rollouts" / "step_1" / "batch.json", b"{}")
    assert progress.poll() == Reached(sampled=True)
    metrics.write_text('{"step": 0}\n{"step": 1}\n')
    assert progress.poll() == Reached(stepped=True, trained=True, sampled=True)
    assert [row["step"] for row in progress.rows] == [0, 1]
    write_atomic(tmp_path / "store/origin/small/versions/2/manifest.json", b"{}")
    assert progress.poll() == Reached(trained=True, sampled=True, published=True)
    # and a stage is done once its product is there
    log = tmp_path / "stage.log"
    stage = StageProgress(tmp_path / "product", log)
    assert (stage.poll(), stage.note) == (Reached(), "")
    log.write_text(f"update 10\n{AT} I update 20\n")
    (tmp_path / "product").touch()
    assert stage.poll() == Reached(sampled=True, trained=True, published=True)
    assert stage.note == "update 20"


NOW = 10_000.0
RUNNING = Snapshot(
    directory=Path("/runs/small"),
    spec=small_spec(),
    at=NOW,
    held_by="process 7 on here",
    run=RunRow("small", "digest", 5, "running", "", NOW - 500, None),
    session=SessionRow(NOW - 400, NOW - 1),
    roles=[
        RoleRow("learner", "running", 0, 7, 7, NOW - 100),
        RoleRow("volunteers-0", "running", 0, 7, 7, NOW - 50),
    ],
    events=[],
    rows=[{"step": number, "time": NOW - 30.0 + 10 * number} for number in range(3)],
    versions=[0, 1, 2, 3],
    published_at=NOW - 9,
    wall_s=400.0,
)


def ended(state: str, reason: str = "", events: Sequence[EventRow] = ()) -> Snapshot:
    row = RunRow("small", "digest", 5, state, reason, NOW - 500, None)
    return replace(RUNNING, held_by=None, run=row, events=events)


def found(seen: Snapshot, type_: str) -> Condition:
    return condition(conditions(seen), type_)


def true_ones(seen: Snapshot) -> list[str]:
    return [each.type for each in conditions(seen) if each.status == "True"]


def test_a_run_that_trains_is_alive_ready_training_and_published() -> None:
    assert true_ones(RUNNING) == ["Alive", "Ready", "Training", "Published"]
    assert found(RUNNING, "Ready").since == NOW - 50, "when the last role came up"
    assert found(RUNNING, "Training").since == NOW - 10
    assert found(RUNNING, "Training").message == "step 3 of 5 was trained 10 s ago"
    assert found(replace(RUNNING, versions=[0, 1, 2]), "Published").reason == "Behind"


def test_newest_steps_that_are_off_or_wrong_are_conditions_with_numbers_and_remedy() -> None:
    step: dict[str, Any] = {"step": 3, "time": NOW - 5}
    off = step | {"sampler_logprob_diff_mean": 0.05, "sampler_logprob_limit": 0.02}
    alarmed = found(replace(RUNNING, rows=[off | {"sampler_logprob_alarm": True}]), "LogprobAlarm")
    assert (alarmed.status, alarmed.reason, alarmed.since) == ("True", "AboveLimit", NOW - 5)
    assert "0.05 from the learner's" in alarmed.message and "is 0.02" in alarmed.message
    near = off | {"sampler_logprob_diff_mean": 0.01, "sampler_logprob_alarm": False}
    assert found(replace(RUNNING, rows=[off, near]), "LogprobAlarm").reason == "WithinLimit"
    assert found(RUNNING, "LogprobAlarm").reason == "NotCompared"
    solved, unsolved = step | {"task_reward": 0.25}, step | {"step": 4, "task_reward": 0.0}
    nothing = found(replace(RUNNING, rows=[solved, unsolved]), "NothingSolved")
    assert (nothing.status, nothing.reason, nothing.since) == ("True", "NoneRight", NOW - 5)
    assert nothing.message.startswith("no rollout of step 4 was right")
    assert "python -m sampler solve-rates" in nothing.message
    assert found(replace(RUNNING, rows=[unsolved, solved]), "NothingSolved").reason == "SomeRight"
    assert found(RUNNING, "NothingSolved").reason == "NotGraded"


def test_a_step_is_late_by_the_pace_of_the_last_ones() -> None:
    # given steps of 100 s, the last of which was trained 600 s ago
    rows = [{"step": number, "time": NOW - 1000.0 + 100 * number} for number in range(5)]
    slow = replace(RUNNING, rows=rows, session=SessionRow(NOW - 2000, NOW))
    assert late_after_s(slow) == 500.0
    assert (found(slow, "Stalled").status, found(slow, "Training").status) == ("True", "False")
    # but a minute is always granted, and before there is a pace the deadline of a step
    assert late_after_s(RUNNING) == 60.0
    assert late_after_s(replace(RUNNING, rows=[])) == RUNNING.spec.algorithm.fill.deadline


def test_an_end_is_its_condition_with_its_reason() -> None:
    for type_ in ("Paused", "Failed", "Finished"):
        seen = ended(type_.lower(), "because")
        assert true_ones(seen) == ["Published", type_]
        assert found(seen, type_).message == "because"
        assert found(seen, "Alive").since == NOW - 1
    # and a step that the coordinator gave up is a stall
    text = "ended with exit code 4, stops the run: step 3 stalled: 0 of 4"
    gave_up = ended("failed", "step 3 stalled", [EventRow(NOW - 3, "coordinator", text, 9)])
    assert true_ones(gave_up) == ["Published", "Stalled", "Failed"]


@pytest.mark.parametrize(
    ("text", "awaited", "holding"),
    [
        ("Finished", Awaited("condition", "Finished"), False),
        ("condition=ready", Awaited("condition", "Ready"), True),
        ("condition=Ready=false", Awaited("condition", "Ready", "False"), False),
        ("paused=False", Awaited("condition", "Paused", "False"), True),
        ("step=3", Awaited("step", number=3), True),
        ("step=4", Awaited("step", number=4), False),
        ("version=3", Awaited("version", number=3), True),
        ("version=4", Awaited("version", number=4), False),
    ],
)
def test_what_is_awaited_is_read_as_kubectl_writes_it(
    text: str, awaited: Awaited, holding: bool
) -> None:
    assert parse_awaited(text) == awaited
    assert holds(awaited, RUNNING) is holding


def test_what_cannot_be_waited_for_is_refused_and_what_is_hopeless_known() -> None:
    for text in ("", "step", "step=-1", "step=x", "pod=3", "Ready=maybe", "=="):
        with pytest.raises(UserError, match="nothing that can be waited for"):
            parse_awaited(text)
    with pytest.raises(UserError, match="did you mean Finished"):
        parse_awaited("condition=Finsihed")
    finished = parse_awaited("Finished")
    assert why_never(finished, RUNNING) is None
    assert why_never(finished, ended("paused")) is None, "somebody may resume it"
    assert why_never(finished, ended("failed", "it broke")) == "the run is failed (it broke)"
    assert why_never(parse_awaited("step=6"), RUNNING) == "the run has 5 steps"


LEARNER = "learner.hardware={kind: cpu, count: 2, price_per_hour: 4}"
WORKERS = "samplers.volunteers={hardware: {kind: cpu, price_per_hour: 0.5}, replicas: 2}"
VALIDATORS = "verify={validators: 3, hardware: {kind: l4, count: 2, price_per_hour: 0.25}}"


def budgeted(hours: float | None, cost: float | None) -> RunSpec:
    """A run that costs 9 an hour."""
    budget = Budget(max_hours=hours, max_cost=cost)
    return small_spec("small", 5, LEARNER, WORKERS).model_copy(update={"budget": budget})


def test_an_hour_costs_what_its_devices_cost_and_the_first_limit_ends_the_run() -> None:
    assert hourly_price(budgeted(None, None)) == 2 * 4 + 2 * 0.5
    assert hourly_price(small_spec("small", 5, LEARNER, WORKERS, VALIDATORS)) == 9 + 3 * 2 * 0.25
    assert hourly_price(small_spec()) is None, "nothing has a price"
    money, both = budgeted(None, 18.0), budgeted(1.0, 18.0)
    assert limits(money) == [Limit("budget.max_cost", 2.0)]
    assert [left_s(money, wall_s) for wall_s in (3600.0, 3 * 3600.0)] == [3600.0, -3600.0]
    assert [limit.path for limit in limits(both)] == ["budget.max_hours", "budget.max_cost"]
    assert left_s(both, 0.0) == 3600.0


HEAVY = {"jax", "torch", "vllm", "matplotlib", "numpy", "pyarrow", "transformers", "httpx", "rich"}


@pytest.mark.parametrize(
    ("statement", "drawn"),
    [
        ("import runspec, runspec.lint.check, runspec.core.spec.load, runspec.local.apply", set()),
        ("import runspec.cli", {"rich"}),
    ],
)
def test_importing_runspec_pulls_in_nothing_heavy(statement: str, drawn: set[str]) -> None:
    program = f"import json, sys\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    modules = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert (HEAVY - drawn).isdisjoint(modules)


@pytest.fixture
def published(tmp_path: Path) -> Run:
    """A run with versions 0 and 1 published, the second evaluated."""
    run = Run(tmp_path / "run", tiny_spec())
    write_initial_model(run)
    for version in (0, 1):
        add_version(run, version)
    Publisher(run.path, run.spec, logging.getLogger("test")).publish_new()
    store(run.path, replace(ZERO, run=run.spec.name, version=1))
    return run


def test_an_export_is_what_was_published_and_its_card_says_how_to_check_it(
    published: Run,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, out = published, tmp_path / "exported"
    # when the newest version is exported, then transformers loads it, without the run's own files
    assert export_version(run.path, run.spec, None, out) == 1
    AutoModelForCausalLM.from_pretrained(out)
    assert not (out / "tensors.json").exists()
    # and the card has evaluation, recipe and digests
    card = (out / "README.md").read_text()
    assert "held-out: version 1: mean 0.25 (0.2 to 0.3)" in card
    assert f"# {run.spec.name}, version 1 of {run.spec.steps}" in card
    # and its command finds what was published
    [command] = [line.strip() for line in card.splitlines() if line.startswith("    python")]
    words = shlex.split(command)
    assert words[:3] == ["python", "-m", "bridge"]
    monkeypatch.chdir(out)
    assert bridge(words[3:]) == 0
    assert "as it was published" in capsys.readouterr().out
    # but no other weights under that name, no other file, and no other root
    config = out / "config.json"
    config.write_text(config.read_text() + " ")
    assert bridge(words[3:]) == 1
    assert "config.json is missing or not what was published" in capsys.readouterr().err
    assert bridge([*words[3:-1], "0" * 64]) == 1
    assert "cannot be believed" in capsys.readouterr().err


def test_what_is_damaged_or_not_there_is_not_exported(published: Run, tmp_path: Path) -> None:
    run, out = published, tmp_path / "out"
    weights = weights_folder(run.path) / "v1" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(UserError, match=r"not version 1 of .*: tensor .* is not what was exported"):
        export_version(run.path, run.spec, 1, out)
    assert not out.exists()
    with pytest.raises(UserError, match="version 7 is not here; there are: 0, 1"):
        export_version(run.path, run.spec, 7, out)
    # and another version still is
    assert export_version(run.path, run.spec, 0, out) == 0
    with pytest.raises(UserError, match="exists already"):
        export_version(run.path, run.spec, 0, out)
