"""Grader processes: one that hangs, dies or lies costs its one answer, and reaches nothing."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from runspec.core.process import RunStopped
from sampler.tasks.grading.answers import MAX_ANSWER_CHARS
from sampler.tasks.grading.graders import Graders, GradersClosed
from sampler.tasks.interfaces import Score, completed
from tests.processes import with_word
from tests.sampler.tasks.grading.plugin import TERM, answers, install_term, reward
from tests.waiting import eventually
from verify.plugins import GraderFault, Problem

pytestmark = pytest.mark.slow
Make = Callable[..., Graders]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes graders for a plug-in of an installed package."""
    made: list[Graders] = []

    def graders(processes: int = 1, timeout: str = "20s", **options: object) -> Graders:
        kind, _ = install_term(tmp_path, monkeypatch, **options)  # type: ignore[arg-type]
        made.append(Graders([reward(kind, timeout=timeout)], processes=processes))
        return made[-1]

    yield graders
    for one in made:
        one.close()


def test_one_hanging_term_costs_its_answer_and_stalls_no_other(make: Make) -> None:
    texts = [str(i) for i in range(50)]
    texts.insert(7, "hang")

    results = make(processes=2, timeout="2s").score(answers("chess", texts))

    fault = results.pop(7)
    assert isinstance(fault, GraderFault)
    assert str(fault) == "p7: no verdict within 2 s"
    assert results == [Score(float(i)) for i in range(50)]


def test_terms_that_hang_in_every_thread_stall_no_answer_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given a term that runs in threads, and answers on which all of these hang
    end = threading.Event()

    class Term:
        role, isolated, timeout_s = "task", False, 0.5

        def score(self, _: Problem, answer: str) -> float:
            if answer == "hang":
                end.wait()
            return float(answer)

    monkeypatch.setattr("sampler.tasks.grading.graders.make_term", completed(Term))
    monkeypatch.setattr("sampler.tasks.grading.graders._GRACE_S", 0.5)
    # When they are graded
    with closing(Graders([reward("chess")], processes=2)) as graders:
        results = graders.score(answers("chess", ["hang", "hang", "1", "0.5"]))
        end.set()
    # Then each costs itself alone
    assert [isinstance(result, GraderFault) for result in results] == [True, True, False, False]
    assert results[2:] == [Score(1.0), Score(0.5)]


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("raise", "RuntimeError: no idea at "),
        ("nan", "the grader returned nan"),
        ("inf", "the grader returned inf"),
        ("text", "the grader returned 'one'"),
        ("segfault", "SIGSEGV"),
        ("leave", "lost"),
        ("memory", "out of memory"),
    ],
)
def test_a_grader_that_fails_is_a_fault_and_the_next_answer_is_graded(
    make: Make, answer: str, says: str
) -> None:
    results = make().score(answers("chess", ["print", answer, "0.5"]))

    assert isinstance(results[1], GraderFault)
    assert says in str(results[1])
    raising = 1 + TERM.splitlines().index('            raise RuntimeError("no idea")')
    assert (answer != "raise") or str(results[1]).endswith(f".py:{raising}")
    assert [results[0], results[2]] == [Score(0.25), Score(0.5)]  # a print is no verdict


@pytest.mark.parametrize("answer", ["hang", "memory", "segfault"])
def test_where_the_answer_decides_the_work_a_limit_is_its_reward_of_0(
    make: Make, answer: str
) -> None:
    (score,) = make(timeout="1s", blames=True).score(answers("chess", [answer]))

    assert isinstance(score, Score)
    assert score.value == 0.0
    assert score.reason


def test_a_grader_reaches_no_file_no_network_and_no_environment(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "key"
    secret.write_text("secret")
    monkeypatch.setenv("SECRET", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        graders = make(secret=str(secret), port=server.getsockname()[1])
        asked = ["environment", "network", "file", "modules"]  # of other terms
        results = graders.score(answers("chess", asked))
    assert results == [Score(0.0)] * 4


def test_several_callers_are_served_at_once(make: Make) -> None:
    graders = make(processes=2)
    found: dict[int, list[object]] = {}

    def call(number: int) -> None:
        found[number] = list(graders.score(answers("chess", [str(number)] * 20)))

    threads = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {n: [Score(float(n))] * 20 for n in range(4)}


def test_an_over_long_answer_is_wrong_and_an_unknown_kind_a_fault(make: Make) -> None:
    graders = make()
    (long,) = graders.score(answers("chess", ["1" * (MAX_ANSWER_CHARS + 1)]))
    (unknown,) = graders.score(answers("go", ["1"]))
    assert isinstance(long, Score) and long.value == 0.0 and "characters" in long.reason
    assert isinstance(unknown, GraderFault) and "no reward of kind 'go'" in str(unknown)


def test_no_characters_of_an_answer_make_it_too_large_to_grade(make: Make) -> None:
    (result,) = make().score(answers("chess", ["\U0001f600" * MAX_ANSWER_CHARS]))
    assert "ValueError" in str(result)  # the term has read it


def test_closing_gives_an_answer_in_work_no_grade_and_no_fault(make: Make) -> None:
    # Given a caller that waits for an answer that never comes
    graders = make(timeout="120s")
    ended: list[Exception] = []

    def call() -> None:
        try:
            graders.score(answers("chess", ["1", "hang", "2"]))
        except GradersClosed as error:
            ended.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    eventually(lambda: graders._pool._alive, "a grader process")
    # When the graders are closed, then it is told so, and claims nothing of anybody
    graders.close()
    thread.join(30)
    assert not thread.is_alive()
    assert len(ended) == 1


def test_a_term_that_no_grader_can_prepare_stops_with_its_words(make: Make) -> None:
    graders = make(broken=True)
    with pytest.raises(RunStopped, match="OSError: no opening book"):
        graders.score(answers("chess", ["1", "2"]))


def test_the_death_of_its_owner_ends_a_grader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a process that grades an answer for ever, its grader known by the module's name
    kind, module = install_term(tmp_path, monkeypatch)
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from sampler.tasks.grading.graders import Graders\n"
        "from tests.sampler.tasks.grading.plugin import answers, reward\n"
        f"Graders([reward({kind!r}, timeout='10m')], processes=1)"
        f".score(answers({kind!r}, ['1', 'hang']))"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], cwd=Path(__file__).parents[4])
    try:
        eventually(lambda: with_word(module), "a grader")
        # When it is killed
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        # Then so is its grader
        eventually(lambda: not with_word(module), "its end")
    finally:
        owner.kill()
