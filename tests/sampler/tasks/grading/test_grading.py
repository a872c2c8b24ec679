"""Graders: one that hangs, dies or lies costs one answer; commands; machines without a sandbox."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import sampler.sandbox
from runspec.core.errors import UserError
from runspec.core.process import RunStopped
from runspec.core.schema import Reward, RunSpec
from sampler.__main__ import main
from sampler.sandbox import Mechanism, Report
from sampler.tasks import launch
from sampler.tasks.grade import read_lines
from sampler.tasks.graders import Graders, GradersClosed
from sampler.tasks.interfaces import MAX_ANSWER_CHARS, Answer, Score, TermRules, completed
from tests.processes import with_word
from tests.sampler.tasks.conftest import laptop_spec
from tests.sampler.tasks.grading.plugin import TERM, answers, install, install_term, reward
from tests.waiting import eventually
from verify.plugins import GraderFault, Problem, require_graders

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[4]
Make = Callable[..., Graders]


@pytest.fixture
def make(tmp_path, monkeypatch):
    """Makes graders for a plug-in of an installed package; `blitz` has little time."""
    monkeypatch.setattr("sampler.sandbox.process._SETTLE_S", 600.0)
    made: list[Graders] = []

    def graders(processes: int = 1, timeout: str = "10m", **options: object) -> Graders:
        kind, _ = install_term(tmp_path, monkeypatch, **options)  # type: ignore[arg-type]
        rewards = [reward(kind, timeout=timeout), reward("blitz", timeout="4s")]
        made.append(Graders(rewards, processes=processes))
        return made[-1]

    yield graders
    for one in made:
        one.close()


def test_one_hanging_term_costs_its_answer_and_stalls_no_other(make):
    asked = answers("chess", [str(i) for i in range(50)])
    asked[7:7] = answers("blitz", ["hang"])

    results = make(processes=2).score(asked)

    fault = results.pop(7)
    assert isinstance(fault, GraderFault)
    assert str(fault) == "p0: no verdict within 4 s"
    assert results == [Score(float(i)) for i in range(50)]


def test_terms_that_hang_in_every_thread_stall_no_answer_behind_them(monkeypatch):
    # given a term that runs in threads, and answers on which all of these hang
    end = threading.Event()

    class Term:
        role, isolated = "task", False

        def score(self, _: Problem, answer: str) -> float:
            if answer == "hang":
                end.wait()
            return float(answer)

    monkeypatch.setattr("sampler.tasks.graders.make_term", completed(Term))
    monkeypatch.setattr("sampler.tasks.graders._GRACE_S", 0.5)
    # when they are graded
    rewards = [reward("chess", timeout="10m"), reward("blitz", timeout="2s")]
    asked = answers("blitz", ["hang"] * 2) + answers("chess", ["1", "0.5", "wrong"])
    with closing(Graders(rewards, processes=2)) as graders:
        results = graders.score(asked)
        end.set()
    # then each costs itself alone, as does one that raises
    assert [i for i, r in enumerate(results) if isinstance(r, GraderFault)] == [0, 1, 4]
    assert results[2:4] == [Score(1.0), Score(0.5)]
    assert "the grader hangs: 2 s" in str(results[0]) and "ValueError" in str(results[4])


def test_a_grader_that_fails_is_a_fault_and_the_next_answer_is_graded(make):
    raising = 1 + TERM.splitlines().index('            raise RuntimeError("no idea")')
    says = {
        "raise": "RuntimeError: no idea at ",
        "nan": "the grader returned nan",
        "inf": "the grader returned inf",
        "text": "the grader returned 'one'",
        "segfault": "SIGSEGV",
        "leave": "lost",
        "memory": "out of memory",
        "\U0001f600" * MAX_ANSWER_CHARS: "ValueError",  # not too large: the term has read it
    }
    asked = [text for failing in says for text in ("print", failing, "0.5")]

    results = make().score(answers("chess", asked))

    faults = results[1::3]
    assert all(isinstance(fault, GraderFault) for fault in faults)
    found = zip(says.values(), faults, strict=True)
    assert [said for said, fault in found if said not in str(fault)] == []
    assert str(faults[0]).endswith(f".py:{raising}")
    assert results[0::3] == [Score(0.25)] * len(says)  # a print is no verdict
    assert results[2::3] == [Score(0.5)] * len(says)


@pytest.mark.parametrize("answer", ["hang", "memory", "segfault"])
def test_where_the_answer_decides_the_work_a_limit_is_its_reward_of_0(make, answer):
    graders = make(timeout="1s" if answer == "hang" else "10m", blames=True)
    (score,) = graders.score(answers("chess", [answer]))
    assert isinstance(score, Score) and score.value == 0.0 and score.reason


def test_a_grader_reaches_no_file_no_network_and_no_environment(make, tmp_path, monkeypatch):
    secret = tmp_path / "key"
    secret.write_text("secret")
    monkeypatch.setenv("SECRET", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        graders = make(secret=str(secret), port=server.getsockname()[1])
        asked = ["environment", "network", "file", "modules"]  # of other terms
        results = graders.score(answers("chess", asked))
    assert results == [Score(0.0)] * 4


def test_several_callers_are_served_at_once(make):
    graders = make(processes=2)
    found: dict[int, list[object]] = {}

    def call(number: int) -> None:
        found[number] = list(graders.score(answers("chess", [str(number)] * 20)))

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: [Score(float(n))] * 20 for n in range(4)}
    # and an over-long answer is wrong, an unknown kind a fault
    (long,) = graders.score(answers("chess", ["1" * (MAX_ANSWER_CHARS + 1)]))
    (unknown,) = graders.score(answers("go", ["1"]))
    assert isinstance(long, Score) and long.value == 0.0 and "characters" in long.reason
    assert isinstance(unknown, GraderFault) and "no reward of kind 'go'" in str(unknown)


def test_closing_gives_an_answer_in_work_no_grade_and_no_fault(make):
    # given a caller that waits for an answer that never comes
    graders = make()
    ended: list[Exception] = []

    def call() -> None:
        try:
            graders.score(answers("chess", ["1", "hang", "2"]))
        except GradersClosed as error:
            ended.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    eventually(lambda: graders._alive, "a grader process")
    # when the graders are closed, then it is told so, and claims nothing of anybody
    graders.close()
    thread.join()
    assert len(ended) == 1
    with pytest.raises(GradersClosed):
        graders.score(answers("chess", ["1"]))


def test_a_term_that_no_grader_can_prepare_stops_with_its_words(make):
    graders = make(broken=True)
    with pytest.raises(RunStopped, match="OSError: no opening book"):
        graders.score(answers("chess", ["1", "2"]))


def test_the_death_of_its_owner_ends_a_grader(tmp_path, monkeypatch):
    # given a process that grades an answer for ever, its grader known by the module's name
    kind, module = install_term(tmp_path, monkeypatch)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from sampler.tasks.graders import Graders\n"
        "from tests.sampler.tasks.grading.plugin import answers, reward\n"
        f"Graders([reward({kind!r}, timeout='10m')], processes=1)"
        f".score(answers({kind!r}, ['1', 'hang']))"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT)
    try:
        eventually(lambda: with_word(module), "a grader")
        # when it is killed
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        # then so is its grader
        eventually(lambda: not with_word(module), "its end")
    finally:
        owner.kill()


PACKAGE = """\
from sampler.tasks.interfaces import Score, TaskTerm

class Bare:
    role = "task"

    def __init__(self, reward):
        self.score = lambda problem, answer: float(answer)

class Derived(TaskTerm):
    limits_blame_answer = True
    timeout_s = 30.0

    def prepare(self):
        self.factor = 0.5

    def score(self, problem, answer):
        return Score(self.factor * float(answer), "half")
"""


def test_a_package_may_derive_from_the_interface_or_not(tmp_path, monkeypatch):
    # given a package with a reward of either sort
    entry_points = "[runspec.rewards]\nbare = chess_kinds:Bare\nderived = chess_kinds:Derived\n"
    install(tmp_path, monkeypatch, "chess_kinds", entry_points, PACKAGE)
    kinds = ("bare", "derived")
    rules = Graders([reward(kind) for kind in kinds]).rules
    # when grader processes grade by both
    rewards = [reward(kind, timeout="10m") for kind in kinds]
    with closing(Graders(rewards, processes=1)) as graders:
        results = graders.score([Answer(Problem("p", kind, "", {}), "1") for kind in kinds])
    # then each is graded by its own rules
    assert results == [Score(1.0), Score(0.5, "half")]
    assert rules == {
        "bare": TermRules(timeout_s=10.0, repeatable=True, limits_blame_answer=False),
        "derived": TermRules(timeout_s=30.0, repeatable=True, limits_blame_answer=True),
    }


# -- Machines without a sandbox: what is refused there, and what is graded all the same ------------

NOWHERE = Report(tuple(Mechanism(n, False, "off") for n in ("namespaces", "landlock", "seccomp")))
SUM = {"inputs": ["1 2\n"], "outputs": ["3"]}
CALL = {"test_list": ["assert add(1, 2) == 3"]}


@pytest.fixture
def bare(monkeypatch):
    """No mechanism of the sandbox works."""
    monkeypatch.setattr("sampler.sandbox.process._SETTLE_S", 600.0)
    monkeypatch.setattr(sampler.sandbox, "probe", lambda: NOWHERE)
    monkeypatch.setattr(launch, "_warned", set())


def spec_of(trust: str, **fields: Any) -> RunSpec:
    spec = laptop_spec()
    pools = [pool.model_copy(update={"trust": trust}) for pool in spec.samplers]
    return spec.model_copy(update={"samplers": pools, "reward": [reward("code", **fields)]})


def test_code_rewards_are_refused_where_no_sandbox_works(bare):
    with pytest.raises(UserError, match="cannot be isolated on this machine") as refused:
        require_graders(spec_of("untrusted"))
    assert refused.value.place == "reward.term"
    assert "user namespaces" in refused.value.remedy
    with pytest.raises(UserError, match="cannot be isolated"):
        Graders([reward("code")])
    # but what executes nothing is not, nor are trusted pools that say so
    require_graders(laptop_spec())
    require_graders(spec_of("trusted", sandboxed=False))


def test_an_untrusted_pool_cannot_do_without_the_sandbox():
    with pytest.raises(UserError, match="the untrusted pool") as refused:
        require_graders(spec_of("untrusted", sandboxed=False))
    assert refused.value.place == "reward.term.sandboxed"


def test_where_the_sandbox_works_it_is_taken_whatever_the_spec_says():
    working = sampler.sandbox.probe().working
    assert launch.mechanisms(required=False, place="reward") == working != ()


def test_graders_need_no_engine_and_import_no_term_before_it_is_asked():
    heavy = {"torch", "vllm", "transformers", "jax", "sympy", "reasoning_gym"}
    program = (
        "import sys, sampler.tasks.grade, sampler.tasks.task_set\n"
        "from sampler.tasks.interfaces import find_kind\n"
        "[find_kind(kind) for kind in ('math', 'code', 'reasoning_gym', 'target_length')]\n"
        f"print({heavy!r} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.stdout == b"set()\n", done.stderr


def test_mathematics_is_graded_without_a_sandbox_and_says_so_once(bare, caplog, monkeypatch):
    # given two grader processes, of which none takes all the answers before the other is there
    both = threading.Barrier(2, timeout=600.0)

    def begin(rewards: Sequence[Reward]) -> launch.GraderProcess:
        both.wait()
        return launch.GraderProcess(rewards)

    monkeypatch.setattr("sampler.tasks.graders.GraderProcess", begin)
    right = Answer(Problem("p", "math", "", {"ground_truth": "1/2"}), "0.5")
    # when they are graded where no sandbox works
    rewards = [reward("math", timeout="10m")]
    with caplog.at_level("WARNING"), closing(Graders(rewards, processes=2)) as graders:
        assert graders.score([right] * 40) == [Score(1.0)] * 40
        started = len(graders._alive)
    # then one line says so, whatever the number of processes, and what to do
    assert started == 2
    (warning,) = [r.getMessage() for r in caplog.records if r.name == launch.__name__]
    assert warning.startswith("reward: no sandbox works on this machine")
    assert "`python -m sampler.sandbox` names what to switch on" in warning


@pytest.mark.parametrize(
    ("info", "program", "timeout", "reason"),
    [
        (SUM, "print(sum(map(int, input().split())))", "10m", ""),
        (CALL, "def add(a, b): return a + b", "10m", ""),
        (SUM, "import time; time.sleep(600)", "1s", "too long"),
        (SUM, "x = bytearray(1 << 40)", "10m", "too much memory"),
        (CALL, "import os\nos._exit(0)", "10m", "exit code 0"),
    ],
)
def test_trusted_pools_may_run_programs_within_limits_alone(bare, info, program, timeout, reason):
    with closing(Graders([reward("code", sandboxed=False, timeout=timeout)])) as graders:
        (score,) = graders.score([Answer(Problem("p", "code", "", info), program)])
    assert isinstance(score, Score)
    assert (score.value == 1.0) is (reason == "")
    assert reason in score.reason


# -- `python -m sampler grade` and `rewards`, as a person or a script calls them -------------------


def row(completion: str, truth: str = "18", **more: Any) -> dict[str, Any]:
    more = {"verification_info": {"ground_truth": truth}, "timeout": 600, **more}
    return {"task_type": "math", "completion": completion, **more}


def written(directory: Path, *lines: object) -> str:
    path = directory / "answers.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts))
    return str(path)


def test_each_line_gets_a_reward_or_an_error_by_its_number(tmp_path, monkeypatch, capsys):
    # given a file of good lines, blank ones and every kind of bad one, and two packages of rewards,
    # of which one does not import
    install_term(tmp_path, monkeypatch)
    point = "[runspec.rewards]\ngo = go_of_nobody:Term\n"
    install(tmp_path, monkeypatch, "go_of_nobody", point, "import a_board_that_is_not_there")
    program = {"task_type": "code", "verification_info": {"inputs": ["1"], "outputs": ["1"]}}
    lines: list[tuple[object, float | str]] = [
        (row("<think>17?</think>18", id="first"), 1.0),
        ({**row("18"), "verification_info": json.dumps({"ground_truth": "18"})}, 1.0),
        ("", ""),
        ("not json", "no JSON"),
        ("[1]", "no JSON object"),
        (row("19"), 0.0),
        ({**row("18"), "task_type": "oracle"}, "no plug-in offers kind 'oracle'"),
        ({**row("18"), "task_type": "target_length"}, "grades lengths"),
        ({**row("18"), "verification_info": 5}, "verification_info"),
        ({**row("18"), "verification_info": {}}, "no ground_truth"),
        ({**row("18"), "completion": None}, "completion: missing"),
        (row("18", timeout="soon"), "timeout"),
        ({**program, "completion": "print(input())"}, 1.0),
        ({**program, "completion": "import time; time.sleep(600)", "timeout": 1}, 0.0),
        (row("18", timeout=1e-5), "timeout: 1e-05 is not in 0.001 to 3600 s"),
        ({**row("0.5"), "task_type": "chess"}, 0.5),
        ({**row("nan"), "task_type": "chess"}, "returned nan"),
        ({**row("1"), "task_type": "go"}, "kind go cannot be loaded: ModuleNotFoundError"),
    ]
    # when it is graded
    code = main(["grade", written(tmp_path, *(line for line, _ in lines)), "--json"])
    # then each line has its own, in order, and the exit code says that some are errors
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    wanted = {number: what for number, (_, what) in enumerate(lines, 1) if what != ""}
    assert code == 1
    assert [r["line"] for r in rows] == [*wanted]
    assert rows[0] == {"line": 1, "id": "first", "reward": 1.0, "reason": ""}
    for found, what in zip(rows, wanted.values(), strict=True):
        if isinstance(what, str):
            assert what in found["error"] and "reward" not in found
        else:
            assert found["reward"] == what and bool(found["reason"]) == (what == 0.0)
    assert "19" in rows[4]["reason"] and "too long" in rows[12]["reason"]
    assert "a_board_that_is_not_there" in rows[-1]["error"]


def test_a_person_reads_a_table_of_printable_lines_and_the_exit_code_is_0(tmp_path, capsys):
    rows = [row("18"), row("19", id="b"), row("18", id="a\nb\x1b[31m"), row("18", id="\ud800é")]
    assert main(["grade", written(tmp_path, *rows)]) == 0
    *lines, total = capsys.readouterr().out.splitlines()
    shown = [["1", "1"], ["2", "b", "0"], ["3", r"a\nb\x1b[31m", "1"], ["4", r"\ud800é", "1"]]
    assert [line.split()[:3] for line in lines] == shown
    assert total == "4 graded, 0 errors"


def test_bad_usage_is_2(tmp_path, capsys):
    assert main(["grade", str(tmp_path / "none.jsonl")]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["grade", str(tmp_path)]) == 2
    with pytest.raises(SystemExit) as stopped:
        main(["grade"])
    assert stopped.value.code == 2


def test_the_plug_ins_are_listed_with_who_offers_them(tmp_path, monkeypatch, capsys):
    install_term(tmp_path, monkeypatch)
    assert main(["rewards"]) == 0
    lines = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    assert lines["math"][1:] == ["task", "grader", "process", "no", "runspec-rl", "0.1.0"]
    assert lines["code"][1:4] == ["task", "sandbox", "of"]
    assert lines["target_length"][1] == "length"
    assert lines["chess"][-2:] == ["chess-rewards", "1.5"]


def test_an_over_long_line_is_named_and_lone_surrogates_are_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr("sampler.tasks.grade.MAX_LINE_BYTES", 200)
    path = written(tmp_path, row("x" * 1000), row("\ud800 18"), row("y" * 300))
    with Path(path).open("rb") as file:
        first, second, third = read_lines(file, "optional")
    assert [first.number, second.number, third.number] == [1, 2, 3]
    assert first.error[:11] == third.error[:11] == "longer than"
    assert second.answer is not None and second.answer.text == "\ufffd 18"


def test_a_reader_that_leaves_ends_the_command_without_a_word():
    # given a pipe that nobody reads
    reader, writer = os.pipe()
    os.close(reader)
    # when a command prints into it
    done = subprocess.run(
        [sys.executable, "-m", "sampler", "rewards"],
        stdout=writer,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    )
    os.close(writer)
    # then it ends, and blames nothing
    assert (done.returncode, done.stderr) == (141, b"")


def test_ctrl_c_ends_the_command_at_once_and_the_program_that_runs():
    # given a program that is graded for a minute
    name = f"left-{os.getpid()}"
    program = (
        "import os, sys, time\nif sys.argv[-1] != 'x':\n"
        f"    os.execv(sys.executable, [sys.executable, __file__, {name!r}, 'x'])\n"
        "while True: time.sleep(1)"
    )
    tests = {"inputs": [""], "outputs": ["1"]}
    line = {"task_type": "code", "completion": program, "verification_info": tests, "timeout": 600}
    with subprocess.Popen(
        [sys.executable, "-m", "sampler", "grade", "-"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
    ) as command:
        assert command.stdin and command.stderr
        command.stdin.write(json.dumps(line).encode() + b"\n")
        command.stdin.close()
        eventually(lambda: with_word(name), "the start of the program")
        # when it is interrupted
        command.send_signal(signal.SIGINT)
        # then it says so, and nothing of the program is left
        assert command.wait() == 130
        assert command.stderr.read() == b"interrupted\n"
    eventually(lambda: not with_word(name), "the end of the program")
