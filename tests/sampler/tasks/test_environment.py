"""Environments: the contract of those that ship, a foreign one's, and what stops a hostile one."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import uuid
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from runspec.core.entry_points import entry_points_of
from runspec.core.errors import UserError
from runspec.core.schema import RunSpec
from runspec.core.schema.load import SpecFiles
from runspec.core.schema.source_files import ENVIRONMENT_GROUP, data_digest
from runspec.core.tokenizer_files import TokenizerFiles
from runspec.lint.check import check_spec
from sampler.tasks.environment import MAX_STATE_BYTES, Call
from sampler.tasks.environments.guess import Guess
from sampler.tasks.graders import Graders
from sampler.tasks.interfaces import find_kind
from sampler.tasks.launch import require_graders
from sampler.tasks.prompts import PromptCodec
from sampler.tasks.task_set import RunTask
from tests.sampler.tasks.conftest import SPECS
from tests.sampler.tasks.grading.plugin import install, reward
from tests.sampler.tasks.test_bridge import CHATML, tokenizer
from verify.plugins import GradeItem, GraderFault, Problem

PROBLEMS = {
    "calculator": {"ground_truth": "12", "expression": "3*4"},
    "grid": {"size": 4, "walls": 3},
    "guess": {"most": 20},
    "python": {"ground_truth": "6", "program": "print(3 * 2)"},
    "search": {"documents": ["Rome is old.", "Oslo is north."], "ground_truth": "Oslo"},
}
SAID = {
    "calculator": ["calc(3*4)", "calc(1/", "12"],
    "grid": ["right", "up", "nowhere", "right", "right", "down", "down", "down"],
    "guess": ["10", "none", "5", "15"],
    "python": ["python(print({'a', 'b'}, object()))", "python(1/0)", "6.0"],
    "search": ["search(what is north)", "search(sea)", "oslo"],
}
PLAY = """\
import json, sys
from importlib.metadata import EntryPoint
from runspec.core.schema import Reward
from sampler.tasks.interfaces import find_kind
from verify.plugins import Problem
kind, verification, said, seed = json.loads(sys.argv[1])
made = find_kind(kind)(Reward.model_validate({"name": "x", "kind": kind}))
problem = Problem("p", kind, "Go.", verification)
state, opened = made.start(problem, seed)
trace, transcript = [state, opened], []
for text in said:
    state, seen, over = made.step(problem, state, text)
    transcript += [{"role": "assistant", "content": text}, *seen]
    trace += [state, seen, over]
    if over:
        break
grade = made.grade(problem, state, transcript)
print(json.dumps([trace, float(getattr(grade, "value", grade))]))
"""


def kinds() -> list[str]:
    return sorted(point.name for point in entry_points_of(ENVIRONMENT_GROUP))


def elsewhere(kind: str, hash_seed: str, *, randomised: bool) -> bytes:
    """An episode in a process of its own."""
    argument = json.dumps([kind, PROBLEMS[kind], SAID[kind], 123456789])
    command = [sys.executable, "-c", PLAY, argument]
    if not randomised:
        command = ["setarch", "--addr-no-randomize", *command]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": hash_seed}, capture_output=True, check=True
    )
    return done.stdout


def test_every_environment_is_in_the_contract():
    assert kinds() == sorted(PROBLEMS) == sorted(SAID)


def test_the_page_shows_the_smallest_environment_whole():
    page = (SPECS.parent / "docs" / "environments.md").read_text()
    assert f"```python\n{inspect.getsource(Guess)}```" in page


@pytest.mark.slow
@pytest.mark.parametrize("kind", PROBLEMS)
def test_an_episode_has_the_same_bytes_in_any_process(kind):
    """Two hash seeds, address space randomised and not."""
    seen = {elsewhere(kind, "1", randomised=True), elsewhere(kind, "77", randomised=False)}
    assert len(seen) == 1
    (trace, grade), *_ = map(json.loads, seen)
    assert 0.0 <= grade <= 1.0 and trace


@dataclass
class Alone:
    """One problem, as a run's problems."""

    kind: str

    @property
    def task_types(self) -> frozenset[str]:
        return frozenset({self.kind})

    def problem(self, index: int) -> Problem:
        return Problem("p", self.kind, "Go.", PROBLEMS[self.kind])


@pytest.mark.parametrize("kind", PROBLEMS)
def test_a_validator_replays_what_a_worker_played(kind):
    # given a worker's task, a validator's, and one of another group's seed
    spec, words = spec_playing(kind), tokenizer()
    files = TokenizerFiles(words, {"eos_token": "<|im_end|>", "chat_template": CHATML}, "here")
    codec = PromptCodec(files, spec.data.model_copy(update={"thinking": "none"}))
    turns = [[*words.encode(text).ids, codec.eos_token_id] for text in SAID[kind]]
    seen = []
    for seed, replays in [(9, False), (9, True), (13, True)]:
        with closing(RunTask(spec, codec, Alone(kind), replays=replays)) as task:
            # when each plays the same turns
            prompt, episode = task.prompt_tokens(0, None, seed), task.episode(0, seed)
            between = [episode.follow(turns[: count + 1]) for count in range(len(turns))]
            item = GradeItem(0, None, [token for turn in turns for token in turn], episode)
            seen.append((prompt, between, task.grade_all([item])[0].task_reward))
    # then worker and validator see the same, and another seed matters where chance is drawn
    assert seen[0] == seen[1] and any(seen[0][1])
    assert (seen[2] != seen[0]) == (kind in ("grid", "guess"))


@pytest.mark.parametrize("kind", ["calculator", "grid", "python"])
def test_an_example_is_a_good_episode(kind):
    made = find_kind(kind)(reward(kind))
    problem = Problem("p", kind, "Go.", {**PROBLEMS[kind], "walls": 0})
    state, _ = made.start(problem, 7)
    for number, text in enumerate(said := made.example(problem), start=1):
        state, seen, over = made.step(problem, state, text)
        assert over == (number == len(said)) == (not seen)
    assert made.grade(problem, state, []) == 1.0


HOSTILE = """\
import datetime, os, random, socket, subprocess, time
from datetime import datetime as imported
from sampler.tasks.environment import Environment

class Bad(Environment):
    max_turns = 4

    def step(self, problem, state, message):
        found = getattr(self, message)() if hasattr(self, message) else message
        words = "x" * (1 << 19) if message == "shout" else "go on"
        return found, [{"role": "user", "content": words}], False

    def grade(self, problem, state, transcript):
        return float("nan")

    def hang(self):
        while True: pass
    def clock(self): return time.time()
    def date(self): return str(datetime.datetime.now())
    def date_imported(self): return str(imported.now())
    def chance(self): return random.random()
    def entropy(self): return os.urandom(4).hex()
    def write(self): open("/tmp/left-behind", "w").write("x")
    def read(self): return open("/etc/hostname").read()
    def fork(self): return os.fork()
    def spawn(self): return subprocess.run(["true"]).returncode
    def network(self): return socket.create_connection(("127.0.0.1", 1), 1)
    def grow(self): return len(bytearray(1 << 36))
    def sleep(self): time.sleep(60)
    def leave(self): os._exit(0)
    def flood(self): return "x" * (1 << 21)
    def state(self): return {1, 2}
"""
LINES = {
    text.split("(")[0].strip().removeprefix("def "): number
    for number, text in enumerate(HOSTILE.splitlines(), start=1)
    if text.strip().startswith("def ")
}
STOPPED = {
    "hang": "Overdue",
    "clock": "time.time is not a function",
    "date": "datetime.now is not a function",
    "date_imported": "datetime.now is not a function",
    "chance": "random.random is not a function",
    "entropy": "os.urandom is not a function",
    "write": "it opens '/tmp/left-behind'",
    "read": "it opens '/etc/hostname'",
    "fork": "it calls os.fork",
    "spawn": "it calls subprocess.Popen",
    "network": "it calls socket.",
    "grow": "MemoryError",
    "sleep": "Overdue",
}
REFUSED = {
    "leave": "the grader process was lost",
    "flood": "the state has over",
    "state": "the state is no plain data",
    "shout": "observations of over",
}


def spec_playing(kind: str) -> RunSpec:
    overrides = (f"reward.calculator.kind={kind}",)
    files = SpecFiles(SPECS / "tools.yaml", profile="laptop", overrides=overrides)
    return check_spec(files).require()


@pytest.fixture
def hostile(tmp_path, monkeypatch):
    module = f"bad_{uuid.uuid4().hex[:8]}"
    points = f"[runspec.environments]\nbad = {module}:Bad\n"
    install(tmp_path, monkeypatch, module, points, HOSTILE, name="bad-environments")
    return module


@pytest.mark.slow
def test_a_hostile_environment_is_stopped_and_named_with_its_line(hostile):
    """Nobody is blamed: each is a fault, after which the next call is answered."""
    problem = Problem("p", "bad", "Go.", {})
    with closing(Graders([reward("bad", timeout="4s")], processes=1)) as graders:
        for deed, words in {**STOPPED, **REFUSED}.items():
            (found,) = graders.play([Call(problem, "step", [None, deed])])
            assert isinstance(found, GraderFault) and words in str(found), (deed, found)
            if deed in STOPPED:
                line = LINES[deed] + (deed == "hang")
                assert f"{hostile}.py:{line}" in str(found), (deed, found)
            assert isinstance(graders.play([Call(problem, "step", [None, "fine"])])[0], dict)
        (found,) = graders.play([Call(problem, "grade", [None, []])])
        assert isinstance(found, GraderFault)
    assert not Path("/tmp/left-behind").exists() and MAX_STATE_BYTES < 1 << 21


def test_an_environment_that_no_stranger_may_play_is_refused_for_untrusted_pools(
    tmp_path, monkeypatch
):
    source = HOSTILE.replace("max_turns = 4", 'determinism = "none"')
    points = "[runspec.environments]\nloose = loose_kind:Bad\n"
    install(tmp_path, monkeypatch, "loose_kind", points, source, name="loose-environments")
    with pytest.raises(UserError, match="not the same on every machine") as error:
        require_graders(spec_playing("loose"))
    assert error.value.place == "reward.calculator.kind"


def test_the_digest_of_the_data_names_the_environments_code(hostile, tmp_path, monkeypatch):
    monkeypatch.chdir(SPECS)
    before = data_digest(spec_playing("bad"))
    (tmp_path / f"{hostile}.py").write_text(HOSTILE + "# other\n")
    assert data_digest(spec_playing("bad")) != before
