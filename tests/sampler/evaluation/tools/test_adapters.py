"""Adapters to evaluation tools: command lines, and files that the real tools wrote.

`written/` has what `python -m tests.campaigns evaluation_tools` left in `.cache/evaluation_tools`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from runspec.core.errors import BadUsage, UserError
from runspec.core.evaluation_tools import Asked, Measured, evaluation_tool

WRITTEN = Path(__file__).parent / "written"


def command(tool: str, *more: str) -> list[str]:
    asked = Asked(
        python=Path("/env/bin/python"),
        url="http://127.0.0.1:9/v1",
        model="run@v3",
        tokenizer=Path("/tokenizer"),
        context=4096,
        task="sums",
        out=Path("/out"),
        more=more,
    )
    return evaluation_tool(tool).command(asked)


def option(words: Sequence[str], name: str) -> str:
    return words[list(words).index(name) + 1]


def read(folder: str, tool: str) -> dict[str, Measured]:
    return dict(evaluation_tool(tool).measured(WRITTEN / folder))


def test_an_unknown_tool_is_named_with_those_that_are_there() -> None:
    with pytest.raises(BadUsage, match="inspect-ai, lm-eval, verifiers"):
        evaluation_tool("lm_eval")


def test_every_tool_is_told_task_server_model_and_folder_and_the_users_options_come_last() -> None:
    programs = {"inspect-ai": "inspect", "lm-eval": "lm-eval", "verifiers": "vf-eval"}
    for tool, program in programs.items():
        words = command(tool, "--more", "1")
        assert words[0] == f"/env/bin/{program}"
        assert words[-2:] == ["--more", "1"]
        said = " ".join(words)
        for value in ("sums", "run@v3", "http://127.0.0.1:9/v1", "/out"):
            assert value in said, (tool, value)


def test_lm_eval_asks_in_chat_or_for_likelihoods() -> None:
    chat = command("lm-eval")
    assert option(chat, "--model") == "local-chat-completions"
    assert "base_url=http://127.0.0.1:9/v1/chat/completions" in option(chat, "--model_args")
    likelihoods = command("lm-eval", "--model", "local-completions")
    assert likelihoods.count("--model") == 1
    arguments = option(likelihoods, "--model_args").split(",")
    assert {"base_url=http://127.0.0.1:9/v1/completions", "tokenizer=/tokenizer"} <= {*arguments}


def test_verifiers_uploads_nothing_and_runs_here_unless_the_user_says_how() -> None:
    words = command("verifiers")
    assert "--no-push" in words
    assert option(words, "--env.agent.runtime.type") == "subprocess"
    own = command("verifiers", "--env.agent.runtime.type", "docker")
    assert own.count("--env.agent.runtime.type") == 1 and "--env.agent.harness.id" not in own


def test_a_log_of_inspect_ai_is_read() -> None:
    found = read("inspect-ai", "inspect-ai")
    log = json.loads((WRITTEN / "inspect-ai" / "log.json").read_text())
    metrics = log["results"]["scores"][0]["metrics"]
    value, error = (metrics[name]["value"] for name in ("accuracy", "stderr"))
    assert found["letters"].count == 3 and found["letters"].faults == 0
    got = found["letters"].figures["includes.accuracy"]
    assert got == pytest.approx((value, value - 1.96 * error, value + 1.96 * error))


def test_a_log_of_inspect_ai_that_failed_is_an_error(tmp_path: Path) -> None:
    log = json.loads((WRITTEN / "inspect-ai" / "log.json").read_text())
    log |= {"status": "error", "error": {"message": "no such tool", "traceback": ""}}
    (tmp_path / "log.json").write_text(json.dumps(log))
    with pytest.raises(UserError, match="letters ended as error: no such tool"):
        evaluation_tool("inspect-ai").measured(tmp_path)


def test_results_of_lm_eval_are_read() -> None:
    found = read("lm-eval-by-likelihood", "lm-eval")["choices"]
    assert found.count == 4
    assert found.figures.keys() == {"acc", "acc_norm"}
    assert found.figures["acc"] == pytest.approx((0.25, 0.25 - 0.49, 0.25 + 0.49))
    # a filter is part of the figure's name
    assert read("lm-eval", "lm-eval")["letters"].figures.keys() == {"exact_match.letter"}


def test_traces_of_verifiers_are_read_with_an_interval_over_problems() -> None:
    found = read("verifiers", "verifiers")["letters"]
    assert (found.count, found.faults) == (3, 0)
    # six answers, of which one has the letter
    mean, low, high = found.figures["mean"]
    assert mean == pytest.approx(1 / 6) and low is not None and high is not None
    assert 0 <= low < mean < high <= 1
    assert "characters" in found.figures


def test_answers_of_verifiers_without_a_reward_are_faults(tmp_path: Path) -> None:
    lines = (WRITTEN / "verifiers" / "run" / "traces.jsonl").read_text().splitlines()
    failed = json.loads(lines[0])
    failed["ok"] = False
    failed["traces"][0]["rewards"] = {"has_letter": None}
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "traces.jsonl").write_text("\n".join([json.dumps(failed), *lines[1:]]))
    found = evaluation_tool("verifiers").measured(tmp_path)["letters"]
    assert (found.count, found.faults) == (3, 1)


@pytest.mark.parametrize(
    ("tool", "folder", "file"),
    [
        ("inspect-ai", "inspect-ai", "log.json"),
        ("lm-eval", "lm-eval", "tiny/results_1.json"),
        ("verifiers", "verifiers", "run/traces.jsonl"),
    ],
)
def test_a_missing_or_malformed_file_is_named(
    tmp_path: Path, tool: str, folder: str, file: str
) -> None:
    adapter = evaluation_tool(tool)
    with pytest.raises(UserError, match="wrote no result"):
        adapter.measured(tmp_path)
    shutil.copytree(WRITTEN / folder, tmp_path / "out")
    (path := tmp_path / "out" / file).write_bytes(path.read_bytes()[:300])
    with pytest.raises(UserError, match=str(path)):
        adapter.measured(tmp_path / "out")
