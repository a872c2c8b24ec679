"""What a run directory says: its holder, state, logs, conditions, budget, and an export."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bridge.__main__ import main as bridge
from bridge.publisher import Publisher
from learner_jax.leaves import load_params
from learner_jax.model import bind
from learner_jax.packing import Sample, pack
from learner_jax.sharding import Execution, make_mesh
from runspec.cli import app, exit_code_of
from runspec.cli.runs import parse_awaited, why_never
from runspec.core.errors import UserError
from runspec.core.models.family import load_config
from runspec.core.run_files import weights_folder
from runspec.core.schema import Budget, Mesh
from runspec.core.schema.load import load_resolved
from runspec.estimate.assumed import hourly_price
from runspec.local import run_dir
from runspec.local.backend import backend
from runspec.local.model_folders import export_version
from runspec.local.progress import RoleError, last_error
from runspec.local.run_view import Condition, RunView, budget_limits
from runspec.local.state import EventRow, RoleRow, RunRow, RunState, SessionRow
from sampler.tasks import traces
from sampler.tasks.prompts import PromptCodec
from tests.bridge.test_publisher import add_version
from tests.harness import TARGET_SHORT
from tests.learner_jax.conftest import Run, tiny_spec, write_initial_model
from tests.runspec.cli.published import code_of_card, publish_run
from tests.runspec.local.fake_run import ZERO, small_spec, store

pytestmark = pytest.mark.slow


def test_a_run_is_found_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "spec.json").write_text("{}")
    assert run_dir.find_run("mine", tmp_path) == tmp_path / "mine"
    assert run_dir.find_run(str(tmp_path / "mine"), tmp_path / "elsewhere") == tmp_path / "mine"
    with pytest.raises(UserError, match="one of: mine"):
        run_dir.find_run("yours", tmp_path)
    # and it lies where the command line says, else the spec, else under runs/
    plain, stored = small_spec(), small_spec("small", 5, f"storage.dir={tmp_path / 'stored'}")
    assert run_dir.run_directory(plain, None) == Path("runs/small").absolute()
    assert run_dir.run_directory(stored, None) == tmp_path / "stored" / "small"
    assert run_dir.run_directory(stored, tmp_path / "said") == tmp_path / "said" / "small"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("alive", [False, True])
def test_another_user_reads_a_run_that_he_may_not_write(alive: bool) -> None:
    program = (
        "import os, sys; from pathlib import Path; from runspec.local.state import RunState\n"
        "os.setuid(65534); print(RunState(Path(sys.argv[1])).run().name)"
    )
    # given a run of root's, in a folder that others may look into
    with tempfile.TemporaryDirectory() as name, closing(RunState(Path(name))) as state:
        state.begin("mine", "digest", 3)
        if not alive:
            state.close()
        Path(name).chmod(0o755)
        for file in Path(name).iterdir():
            file.chmod(0o644)
        # when nobody in particular looks at it, then he is told
        command = [sys.executable, "-c", program, name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "mine", done.stderr


def test_damaged_files_are_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "state.db").write_bytes(b"no database" * 1000)
    with pytest.raises(UserError, match="not a database") as error:
        RunState(tmp_path)
    assert "runspec delete" in error.value.remedy
    (tmp_path / "site.json").write_text("{")
    with pytest.raises(UserError, match=r"site\.json: cannot be read"):
        run_dir.read_site(tmp_path)
    with pytest.raises(UserError, match=r"no backend 'slurp'; there is local, .*ray"):
        backend("slurp")


def test_a_command_on_a_run_of_another_machine_is_carried_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir.note_site(tmp_path / "runs" / "far", {"backend": "fake", "run": "far", "address": "x"})
    carried: list[list[str]] = []
    there = SimpleNamespace(command=lambda site, words: carried.append(list(words)) or code)
    monkeypatch.setattr(run_dir, "backend", {"fake": there}.__getitem__)
    monkeypatch.chdir(tmp_path)

    def command(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["runspec", *words])
        try:
            return exit_code_of(app)
        except SystemExit as end:  # of a command that ends here
            return int(str(end.code))

    # when a command names the run, by its name or by its folder here, then it names the run there
    code = 0
    for named in ("far", "runs/far"):
        assert command("logs", named, "--role", "learner") == 0
        runs = ["--runs-dir", str(tmp_path / "runs")]
        assert carried.pop() == ["logs", "far", "--role", "learner", *runs]
    # and delete takes the note along, unless it was refused
    for code, left in ((5, True), (0, False)):
        assert command("delete", "far", "--yes") == code
        assert (tmp_path / "runs" / "far").exists() == left


def test_the_cost_or_the_hours_end_the_run_whichever_come_first() -> None:
    learner = "learner.hardware={kind: cpu, count: 2, price_per_hour: 4}"
    workers = "samplers.volunteers={hardware: {kind: cpu, price_per_hour: 0.5}, replicas: 2}"
    spec = small_spec("small", 5, learner, workers)
    assert (hourly_price(spec), hourly_price(small_spec())) == (2 * 4 + 2 * 0.5, None)
    money, both = (
        spec.model_copy(update={"budget": Budget(max_hours=hours, max_cost=18.0)})
        for hours in (None, 1.0)
    )
    assert budget_limits(money) == {"budget.max_cost": 2.0}
    limits = {"budget.max_hours": 1.0, "budget.max_cost": 2.0}
    assert [*budget_limits(both).items()] == [*limits.items()]


def test_the_last_error_since_the_last_start_is_found(tmp_path: Path) -> None:
    log, at = tmp_path / "validator-0.log", "2026-01-01 10:00:01,000"
    started = "--- 2026-01-01 10:00:00 starting: python -m verify validator\n"
    error = f"{at} E validator reward.r: it broke\n  remedy: mend it\n"
    traceback = 'Traceback (most recent call last):\n  File "m.py", line 3, in a\n\nKeyError: "g"\n'
    assert last_error(log) is None
    for text, found in (
        (f"{started}{at} I validator working\n", None),
        (error, RoleError("reward.r: it broke", "mend it")),
        (error + traceback, RoleError('KeyError: "g"')),
        (f"{at} E x internal error\n{traceback}", RoleError('KeyError: "g"')),
        (error + started, None),
        (f"{at} E x a\x1b[2Jb{'c' * 9000}", RoleError("a?[2Jb" + "c" * 794)),
    ):
        log.write_text(text)
        assert last_error(log) == found


NOW = 10_000.0
RUNNING = RunView(
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


def seen(**changes: Any) -> dict[str, Condition]:
    return replace(RUNNING, **changes).conditions


def test_a_run_with_a_warm_start_is_ready_once_its_roles_run() -> None:
    stage = RoleRow("warm-start", "running", 0, 7, 7, NOW - 200)
    assert seen(roles=[stage])["Ready"].message == "waits for warm-start (running)"
    done = replace(stage, state="finished", pid=None)
    assert seen(roles=[done])["Ready"].message == "waits for its roles"
    found = seen(roles=[done, *RUNNING.roles])["Ready"]
    assert (found.status, found.message) == ("True", "2 roles run")
    for name, state in (("warm-start", "failed"), ("learner", "finished")):
        role = replace(stage, name=name, state=state)
        found = seen(roles=[role, *RUNNING.roles])["Ready"]
        assert (found.status, found.message) == ("False", f"waits for {name} ({state})")


def ended(state: str, reason: str = "", **changes: Any) -> RunView:
    row = RunRow("small", "digest", 5, state, reason, NOW - 500, None)
    return replace(RUNNING, held_by=None, run=row, **changes)


def test_a_run_that_trains_is_alive_ready_training_and_published_until_it_ends() -> None:
    found = seen()
    true = [name for name, each in found.items() if each.status == "True"]
    assert true == ["Alive", "Ready", "Training", "Published"]
    assert found["Ready"].since == NOW - 50, "when the last role came up"
    assert (found["Training"].since, found["Training"].message) == (
        *(NOW - 10, "step 3 of 5 was trained 10 s ago"),
    )
    assert seen(versions=[0, 1, 2])["Published"].reason == "Behind"
    # given steps of 100 s, the last of which was trained 600 s ago, then the next one is late
    rows = [{"step": number, "time": NOW - 1000.0 + 100 * number} for number in range(5)]
    slow = replace(RUNNING, rows=rows, session=SessionRow(NOW - 2000, NOW))
    assert slow.late_after_s == 500.0
    assert slow.conditions["Stalled"].status == "True"
    # but a minute is always granted, and before there is a pace the deadline of a step
    assert RUNNING.late_after_s == 60.0
    assert replace(RUNNING, rows=[]).late_after_s == RUNNING.spec.algorithm.fill.deadline
    # and an end is its condition with its reason; a step that the coordinator gave up is a stall
    text = "ended with exit code 4, stops the run: step 3 stalled: 0 of 4"
    gave_up = [EventRow(NOW - 3, "coordinator", text, 9, exit_code=4)]
    for state, events, true in (
        ("paused", [], ["Published", "Paused"]),
        ("failed", gave_up, ["Published", "Stalled", "Failed"]),
    ):
        over = ended(state, "because", events=events).conditions
        assert [name for name, each in over.items() if each.status == "True"] == true
        assert over[true[-1]].message == "because"


def test_newest_steps_that_are_off_or_wrong_are_conditions_with_numbers_and_remedy() -> None:
    step: dict[str, Any] = {"step": 3, "time": NOW - 5}
    off = step | {"sampler_logprob_diff_mean": 0.05, "sampler_logprob_limit": 0.02}
    alarmed = seen(rows=[off | {"sampler_logprob_alarm": True}])["LogprobAlarm"]
    assert (alarmed.status, alarmed.reason, alarmed.since) == ("True", "AboveLimit", NOW - 5)
    assert "0.05 from the learner's" in alarmed.message and "is 0.02" in alarmed.message
    near = off | {"sampler_logprob_diff_mean": 0.01, "sampler_logprob_alarm": False}
    assert seen(rows=[off, near])["LogprobAlarm"].reason == "WithinLimit"
    solved, unsolved = step | {"task_reward": 0.25}, step | {"step": 4, "task_reward": 0.0}
    nothing = seen(rows=[solved, unsolved])["NothingSolved"]
    assert (nothing.status, nothing.reason, nothing.since) == ("True", "NoneRight", NOW - 5)
    assert nothing.message.startswith("no rollout of step 4 was right")
    assert "python -m sampler solve-rates" in nothing.message
    assert seen(rows=[unsolved, solved])["NothingSolved"].reason == "SomeRight"


def test_what_cannot_be_waited_for_is_refused_and_what_is_hopeless_known() -> None:
    for text in ("", "step", "step=-1", "step=x", "pod=3", "Ready=maybe", "=="):
        with pytest.raises(UserError, match="nothing that can be waited for"):
            parse_awaited(text)
    for text, holding in (("step=3", True), ("step=4", False), ("version=4", False)):
        assert (parse_awaited(text).holds(RUNNING) is not None) == holding
    finished = parse_awaited("Finished")
    assert why_never(finished, ended("paused")) is None, "somebody may resume it"
    assert why_never(finished, ended("failed", "it broke")) == "the run is failed (it broke)"
    assert why_never(parse_awaited("step=6"), RUNNING) == "the run has 5 steps"


HEAVY = {"jax", "torch", "vllm", "matplotlib", "numpy", "pyarrow", "transformers", "httpx", "rich"}
_LINT = f"""
from runspec.cli import app
app(["lint", {str(TARGET_SHORT)!r}], standalone_mode=False)
assert not {{"runspec.simulate", "rich.table"}} & {{*sys.modules}}, "slow to import"
"""


@pytest.mark.parametrize(
    ("statement", "drawn"),
    [
        (
            "import runspec, runspec.lint.check, runspec.core.schema.load, runspec.local.apply",
            set(),
        ),
        ("import runspec.cli", {"rich"}),
        (_LINT, {"rich"}),
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


OLD_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", **traces.TOKENIZER_CONFIG}


@pytest.mark.parametrize("made", ["today", "before"])
def test_the_cards_snippet_gives_the_tokens_and_logits_of_the_run(
    made: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a version of a Qwen 2, for which AutoTokenizer has a tokenizer of its own; as it is made
    # today, or was before the tokenizer's files said that it is none of Qwen's
    if made == "before":
        old = {"tokenizer_config.json": json.dumps(OLD_CONFIG)}
        monkeypatch.setattr(traces, "made_tokenizer_files", lambda config: old)
    run_dir, out = publish_run(tmp_path, 1), tmp_path / "exported"
    spec = load_resolved(run_dir)
    export_version(run_dir, spec, None, out)
    # when the card's lines are run in its folder
    assert ("AutoTokenizer" in code_of_card(out)) == (made == "today")
    monkeypatch.chdir(out)
    exec(code_of_card(out), found := dict[str, Any]())
    # then the prompt is the run's, token by token, and so is text that goes back and forth
    codec, words = PromptCodec.read(weights_folder(run_dir) / "v0", spec.data), "tom has 7 apples"
    [ids] = found["ids"].tolist()
    assert ids == codec.prompt_tokens("Your question", spec.reward[0].targets[0])
    assert found["tokenizer"].encode(words) == codec.encode(words)
    assert found["tokenizer"].decode(codec.encode(words)) == words
    # and the logits are the learner's
    with torch.no_grad():
        theirs = found["model"](found["ids"]).logits[0]
    config, mesh = load_config(out), make_mesh(Mesh())
    policy = bind(config, load_params(out, config, mesh))
    batch = pack([Sample(ids[:1], ids[1:])], tokens=64, rows=1).token_batch(0)
    execution = Execution(jnp.dtype("float32"), mesh=mesh)
    hidden = policy(batch.tokens, batch.segment_ids, batch.positions, execution)
    ours = np.asarray(hidden @ policy.head_weight())[0, : len(ids)]
    np.testing.assert_allclose(ours, theirs, atol=1e-4)
    if made == "today":  # with the folder's own code, too
        own = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
        assert type(own).__name__ == "ExactTokenizer" and own.decode(own.encode(words)) == words


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
