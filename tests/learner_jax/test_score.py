"""`python -m learner_jax score`: log-probs of given tokens, in the order they came."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from learner_jax import score
from learner_jax.__main__ import main
from tests.learner_jax.families import VOCABULARY, lines, saved, theirs

NAME = "llama 3"


def run(tokens: Path, *options: str) -> int:
    return main(["score", str(saved(NAME)), "--tokens", str(tokens), *options])


def write(path: Path, rows: list[list[int]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_log_probs_are_those_of_transformers_in_the_files_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given a line for each of some samples
    tokens = write(tmp_path / "tokens.jsonl", [ids.tolist() for ids in lines()])
    # when they are scored on one device and on four
    assert run(tokens, "--mesh", "fsdp=1") == 0
    one = capsys.readouterr().out
    assert run(tokens, "--mesh", "fsdp=2,tensor=2", "--out", str(tmp_path / "out.jsonl")) == 0
    four = (tmp_path / "out.jsonl").read_text()
    # then both say what transformers says
    for text in (one, four):
        found = [json.loads(line) for line in text.splitlines()]
        for values, expected in zip(found, theirs(NAME, "float32").logprobs, strict=True):
            np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-4)


def test_thousands_of_lines_come_out_in_order_and_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # given many lines of few kinds, and room for a part of them at a time
    monkeypatch.setattr(score, "WINDOW_TOKENS", 5000)
    kinds = np.random.default_rng(0).integers(0, len(lines()), 2000)
    tokens = write(tmp_path / "tokens.jsonl", [lines()[kind].tolist() for kind in kinds])
    # when they are scored
    assert run(tokens, "--mesh", "fsdp=1") == 0
    # then each line's log-probs are those of its kind
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = theirs(NAME, "float32").logprobs
    for kind, values in zip(kinds, found, strict=True):
        np.testing.assert_allclose(values, expected[kind], rtol=1e-4, atol=1e-4)


def test_bf16_is_near_and_is_not_float32(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # given one line
    tokens = write(tmp_path / "tokens.jsonl", [lines()[3].tolist()])
    # when it is computed in bfloat16
    assert run(tokens, "--mesh", "fsdp=1", "--dtype", "bfloat16") == 0
    # then it is off by bfloat16's rounding
    found = json.loads(capsys.readouterr().out)
    expected = theirs(NAME, "float32").logprobs[3]
    difference = np.abs(np.array(found) - expected).mean() / np.abs(expected).mean()
    assert 1e-4 < difference < 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1, 2]\n[1, 2", r"tokens\.jsonl:2: not JSON"),
        ("[1, 2]\n\n[1, 2]\n", r"tokens\.jsonl:2: not JSON"),
        ("[1]\n", r"tokens\.jsonl:1: 1 tokens: the first has no log-prob"),
        ("[1, 2]\n[]\n", r"tokens\.jsonl:2: 0 tokens"),
        ("[1, 2.0]\n", r"tokens\.jsonl:1: not a JSON list of whole numbers"),
        ("[1, true]\n", r"tokens\.jsonl:1: not a JSON list of whole numbers"),
        ('{"a": 1}\n', r"tokens\.jsonl:1: not a JSON list of whole numbers"),
        (f"[1, {VOCABULARY}]\n", rf"tokens\.jsonl:1: token {VOCABULARY} of a vocabulary of"),
        ("[-1, 1]\n", r"tokens\.jsonl:1: token -1 of a vocabulary"),
        ("[" * 100_000 + "\n", r"tokens\.jsonl:1: not JSON"),
        (f"[1, {'9' * 5000}]\n", r"tokens\.jsonl:1: not JSON|tokens\.jsonl:1: token 9"),
        ("\xff\xfe\n", r"tokens\.jsonl:1: not JSON"),
        ("", r"tokens\.jsonl: no lines"),
    ],
)
def test_a_line_that_cannot_be_scored_is_named(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    # given a file with a fault in one line
    path = tmp_path / "tokens.jsonl"
    path.write_bytes(text.encode("latin-1"))
    # when it is scored
    code = run(path)
    # then the command fails before it computes anything, and names file and line
    captured = capfd.readouterr()
    assert (code, captured.out) == (1, "")
    assert re.search(message, captured.err), captured.err


def test_a_line_longer_than_is_ever_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(score, "MAX_LINE_BYTES", 64)
    assert run(write(tmp_path / "tokens.jsonl", [[1, 2], [1] * 65])) == 1
    assert "tokens.jsonl:2: longer than 64 bytes" in capfd.readouterr().err


@pytest.mark.parametrize("mesh", ["fsdp", "fsdp=x", "rows=2", "fsdp=0", ""])
def test_a_mesh_that_is_none_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], mesh: str
) -> None:
    tokens = write(tmp_path / "tokens.jsonl", [[1, 2]])
    assert run(tokens, "--mesh", mesh) == 1
    assert f"--mesh: {mesh!r} is not a mesh" in capfd.readouterr().err
