"""Evaluation: due versions, their arrival, figures, overlap with training data, outside tools."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from runspec.core.entry_points import Asked, evaluation_tool
from runspec.core.errors import BadUsage, UserError
from runspec.core.schema import Evaluation
from sampler.evaluation.ask import WORDS, Overlap, figures, interval, majority, overlaps, pass_at_k
from sampler.evaluation.evaluator import Arrivals, Results, due, due_versions
from tests.broadcast.conftest import ModelVersions, Run
from tests.broadcast.fake_relay import held_until
from tests.figures import figures_of
from tests.verify.coordinator.deployment import tiny_spec
from tests.waiting import eventually
from verify.formats.documents import Evaluated, Figure, ProblemResult
from verify.plugins import WeightsLocation

STEPS, SUITES, LONG_S = 10, 1000, 600.0

# -- Which versions are evaluated ------------------------------------------------------------------


def spec(**fields):
    evaluation = Evaluation.model_validate({"name": "e", "source": "s", "every": 4, **fields})
    return tiny_spec(steps=STEPS).model_copy(update={"evaluations": [evaluation]})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0, 4, 8, 10]),
        ({"at_start": False}, [4, 8, 10]),
        ({"at_end": False}, [0, 4, 8]),
        ({"every": 5, "at_end": False}, [0, 5]),
        ({"every": 100}, [0, 10]),
    ],
)
def test_versions_are_due_by_number_the_first_and_the_last(fields, expected):
    assert due_versions(spec(**fields), -1, STEPS, ()) == expected


def test_only_new_ones_are_due_that_are_not_done():
    assert due_versions(spec(), 0, 8, {("e", 8)}) == [4]
    assert due(spec(), 8, {("e", 8)}) == []
    assert due(spec(), 8, {("other", 8)}) == spec().evaluations


# -- Their arrival ---------------------------------------------------------------------------------


def test_the_newest_due_version_is_taken_once_it_is_there_and_others_are_named(tmp_path, caplog):
    (tmp_path / "store").mkdir()
    with ExitStack() as up:
        run = Run(tmp_path, up)
        model, server, cache = ModelVersions(run), run.static(), run.folder / "own" / "weights"
        asked, go_on = threading.Event(), threading.Event()

        def hold_back(request) -> None:
            asked.set()
            held_until(go_on)(request)

        def even(after: int, newest: int) -> list[int]:
            return [version for version in range(after + 1, newest + 1) if version % 2 == 0]

        # given version 0, which is announced, and whose files are slow to come
        server.answer("/versions/0/", hold_back)
        model.publish(0)
        source = WeightsLocation(run.name, [server.url], run.root, cache)
        arrivals = Arrivals(source, LONG_S, logging.getLogger("test"), due=even)
        up.callback(arrivals.close)
        assert asked.wait(LONG_S)
        # then an evaluator that waits for the last version goes on waiting
        assert arrivals.take(0.01) is None and arrivals.newest == -1
        go_on.set()
        first = arrivals.take(LONG_S)
        assert first is not None and first.version == 0
        eventually(lambda: arrivals.newest == 0, "it is seen")
        # when four more come out while it works on that
        for version in range(1, 5):
            model.publish(version)
            eventually(lambda v=version: arrivals.newest == v, f"version {version} is seen")
        # then the one that it had no time for is named
        eventually(lambda: "version 2 is not evaluated" in caplog.text, "it says so")
        assert "version 1 " not in caplog.text and "version 3 " not in caplog.text
        # and it goes on with the newest that is due, and the one in hand was not removed
        assert (cache / "v0").exists()
        second = arrivals.take(LONG_S)
        assert second is not None and (second.version, second.path) == (4, cache / "v4")
        assert arrivals.take(0.0) is None


# -- Figures, against brute force and simulated suites ---------------------------------------------


def test_pass_at_k_is_the_share_of_all_subsets_with_a_solution():
    for solved in range(7):
        for k in (1, 2, 4, 6):
            subsets = list(combinations([True] * solved + [False] * (6 - solved), k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(6, solved, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("problems", "samples", "a", "b", "most"),
    [
        (100, 4, 0.4, 0.6, 0.97),
        (150, 8, 2.0, 5.0, 0.97),
        # of few problems at least as often
        (5, 4, 1.0, 1.0, 1.0),
        (12, 1, 0.5, 0.5, 1.0),
        (30, 1, 10.0, 0.5, 1.0),
    ],
)
def test_intervals_cover_the_truth_in_95_percent(problems, samples, a, b, most):
    """Of simulated mean rewards of problems whose solve rates are Beta(a, b)."""
    rng = np.random.default_rng(problems * samples)
    rates = rng.beta(a, b, (SUITES, problems))
    found = [interval(suite) for suite in rng.binomial(samples, rates) / samples]
    assert 0.93 <= sum(low <= a / (a + b) <= high for low, high in found) / SUITES <= most


def test_intervals_of_lengths_and_of_suites_that_are_all_solved():
    lengths = np.random.default_rng(0).gamma(4.0, 100.0, (SUITES, 40))
    found = [interval(suite) for suite in lengths]
    assert sum(low <= 400.0 <= high for low, high in found) >= 0.93 * len(found)
    low, high = interval(np.ones(200))
    assert low < 1.0 and high == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [
        (["4", " 4 ", "5"], [1.0, 1.0, 0.0], 1.0),
        (["4", "5", "5"], [1.0, 0.0, 0.0], 0.0),
        (["4", "5"], [1.0, 0.0], 0.5),
        ([None, None, "4"], [0.0, 0.0, 1.0], 1.0),
        ([None, None], [0.0, 0.0], 0.0),
        (["4", "5"], [None, 0.0], 0.0),
        (["4"], [None], None),
    ],
)
def test_majority_is_the_reward_of_the_most_frequent_answer(answers, rewards, expected):
    assert majority(answers, rewards) == expected


def test_figures_are_means_over_problems():
    problems = [
        ProblemResult("a", 10, [1.0, 0.0, None], [9, 12, 3], 0.5),
        ProblemResult("b", 20, [1.0, 1.0, 1.0], [20, 20, 20], 1.0),
    ]
    found = figures(problems)
    assert {name: figure.value for name, figure in found.items()} == {
        "mean": 0.75,
        "pass-2": 1.0,
        "majority": 0.75,
        "length": 14.0,
        "length-error": pytest.approx((1 + 2 + 7) / 6),
    }
    assert found["mean"].low is not None and found["mean"].low < 0.75


def test_prometheus_sees_the_newest_version_and_its_figures():
    def result(version: int, **figures: Figure) -> Evaluated:
        return Evaluated("run", "held-out", version, None, figures, 0, [], 0.0, 2.0, 1.0)

    # given an evaluator that was started again after versions 0 and 10
    results = Results([("held-out", 10), ("held-out", 0), ("other", 0)])
    seen = {
        "runspec_evaluator_newest_version/held-out": 10.0,
        "runspec_evaluator_newest_version/other": 0.0,
        "runspec_evaluator_busy_seconds_total": 0.0,
    }
    assert figures_of(results) == seen
    # when it has evaluated two further versions
    results.evaluated(result(20, mean=Figure(0.1, 0.0, 0.2)))
    results.evaluated(result(30, mean=Figure(0.5, None, None), length=Figure(7, 6, 8)))
    # then the last has taken the other's place; one problem alone has no interval
    assert figures_of(results) == seen | {
        "runspec_evaluator_newest_version/held-out": 30.0,
        "runspec_evaluator_busy_seconds_total": 4.0,
        "runspec_evaluator_figure/held-out/mean/estimate": 0.5,
        "runspec_evaluator_figure/held-out/length/estimate": 7.0,
        "runspec_evaluator_figure/held-out/length/low": 6.0,
        "runspec_evaluator_figure/held-out/length/high": 8.0,
    }


# -- Contamination ---------------------------------------------------------------------------------

LONG = "If a train leaves the station at nine and travels at sixty miles an hour how far is it"


def test_problems_that_stand_in_the_training_problems_are_found():
    words = LONG.split()
    assert len(words) > WORDS
    # whatever their case and signs
    equal = [("a", "What is 2 + 2?"), ("b", "What is 3 + 3?")]
    trained = [("t0", "Something else"), ("t1", "what is 2, 2")]
    assert overlaps(equal, trained) == [Overlap("a", True, "t1")]
    # thirteen words in a row are an overlap and twelve are none
    for count, found in ((WORDS, [Overlap("a", False, "t")]), (WORDS - 1, [])):
        part = " ".join(words[2 : 2 + count])
        assert overlaps([("a", f"{LONG} by noon")], [("t", f"Say: {part}!")]) == found
    # an exact one outweighs a part and order is that of the suite
    trained = [("part", f"{LONG} then"), ("b2", "short one"), ("same", LONG)]
    asked = [("a", LONG), ("b", "Short one")]
    assert overlaps(asked, trained) == [Overlap("a", True, "same"), Overlap("b", True, "b2")]


# -- Outside tools: command lines, and files that the real tools wrote -----------------------------

WRITTEN = Path(__file__).parent / "tools" / "written"
"""What `python -m tests.campaigns evaluation_tools` left in `.cache/evaluation_tools`."""
FILES = {
    "inspect-ai": "log.json",
    "lm-eval": "tiny/results_1.json",
    "verifiers": "run/traces.jsonl",
}


def command(tool: str, *more: str) -> list[str]:
    paths = {
        "python": Path("/env/bin/python"),
        "tokenizer": Path("/tokenizer"),
        "out": Path("/out"),
    }
    where = {"url": "http://127.0.0.1:9/v1", "model": "run@v3", "context": 4096, "task": "sums"}
    return list(evaluation_tool(tool).command(Asked(more=more, **paths, **where)))


def option(words: list[str], name: str) -> str:
    return words[words.index(name) + 1]


def test_every_tool_is_told_task_server_model_and_folder_and_the_users_options_come_last():
    programs = {"inspect-ai": "inspect", "lm-eval": "lm-eval", "verifiers": "vf-eval"}
    for tool, program in programs.items():
        words = command(tool, "--more", "1")
        assert words[0] == f"/env/bin/{program}"
        assert words[-2:] == ["--more", "1"]
        for value in ("sums", "run@v3", "http://127.0.0.1:9/v1", "/out"):
            assert value in " ".join(words), (tool, value)
    with pytest.raises(BadUsage, match="inspect-ai, lm-eval, verifiers"):
        evaluation_tool("lm_eval")


def test_lm_eval_asks_in_chat_or_for_likelihoods_and_verifiers_runs_here():
    chat = command("lm-eval")
    assert option(chat, "--model") == "local-chat-completions"
    assert "base_url=http://127.0.0.1:9/v1/chat/completions" in option(chat, "--model_args")
    likelihoods = command("lm-eval", "--model", "local-completions")
    assert likelihoods.count("--model") == 1
    arguments = option(likelihoods, "--model_args").split(",")
    assert {"base_url=http://127.0.0.1:9/v1/completions", "tokenizer=/tokenizer"} <= {*arguments}
    # verifiers uploads nothing, and runs here unless the user says how
    words = command("verifiers")
    assert "--no-push" in words
    assert option(words, "--env.agent.runtime.type") == "subprocess"
    own = command("verifiers", "--env.agent.runtime.type", "docker")
    assert own.count("--env.agent.runtime.type") == 1 and "--env.agent.harness.id" not in own


def copied(tool: str, folder: Path) -> Path:
    """The file of a tool in a copy of what it wrote."""
    return Path(shutil.copytree(WRITTEN / tool, folder / "out")) / FILES[tool]


def test_a_log_of_inspect_ai_is_read_and_one_that_failed_is_an_error(tmp_path):
    found = evaluation_tool("inspect-ai").measured(WRITTEN / "inspect-ai")["letters"]
    path = copied("inspect-ai", tmp_path)
    log = json.loads(path.read_text())
    metrics = log["results"]["scores"][0]["metrics"]
    value, error = (metrics[name]["value"] for name in ("accuracy", "stderr"))
    assert (found.count, found.faults) == (3, 0)
    expected = (value, value - 1.96 * error, value + 1.96 * error)
    assert found.figures["includes.accuracy"] == pytest.approx(expected)
    log |= {"status": "error", "error": {"message": "no such tool", "traceback": ""}}
    path.write_text(json.dumps(log))
    with pytest.raises(UserError, match="letters ended as error: no such tool"):
        evaluation_tool("inspect-ai").measured(tmp_path / "out")


def test_results_of_lm_eval_are_read():
    adapter = evaluation_tool("lm-eval")
    found = adapter.measured(WRITTEN / "lm-eval-by-likelihood")["choices"]
    assert (found.count, found.figures.keys()) == (4, {"acc", "acc_norm"})
    assert found.figures["acc"] == pytest.approx((0.25, 0.25 - 0.49, 0.25 + 0.49))
    # a filter is part of the figure's name
    letters = adapter.measured(WRITTEN / "lm-eval")["letters"]
    assert letters.figures.keys() == {"exact_match.letter"}


def test_traces_of_verifiers_have_an_interval_over_problems_and_faults(tmp_path):
    found = evaluation_tool("verifiers").measured(WRITTEN / "verifiers")["letters"]
    assert (found.count, found.faults) == (3, 0)
    # six answers, of which one has the letter
    mean, low, high = found.figures["mean"]
    assert mean == pytest.approx(1 / 6) and low is not None and high is not None
    assert 0 <= low < mean < high <= 1
    assert "characters" in found.figures
    # and an answer without a reward is a fault
    path = copied("verifiers", tmp_path)
    first, *lines = path.read_text().splitlines()
    failed = json.loads(first) | {"ok": False}
    failed["traces"][0]["rewards"] = {"has_letter": None}
    path.write_text("\n".join([json.dumps(failed), *lines]))
    found = evaluation_tool("verifiers").measured(tmp_path / "out")["letters"]
    assert (found.count, found.faults) == (3, 1)


@pytest.mark.parametrize("tool", FILES)
def test_a_missing_or_malformed_file_is_named(tmp_path, tool):
    adapter = evaluation_tool(tool)
    with pytest.raises(UserError, match="wrote no result"):
        adapter.measured(tmp_path)
    path = copied(tool, tmp_path)
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError, match=str(path)):
        adapter.measured(tmp_path / "out")
