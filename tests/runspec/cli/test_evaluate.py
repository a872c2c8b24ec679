"""`runspec evaluate`: suites over a directory of weights and over a run's version."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sampler.tasks.traces import build_warm_start_data
from tests.runspec.cli.in_process import runspec
from tests.runspec.local.fake_run import small_spec
from tests.sampler.engine.models import save_version

SUITE = """\
data:
  sources:
    - {name: words, kind: jsonl, uri: words.jsonl, train: false}
    - {name: trained, kind: jsonl, uri: trained.jsonl}
reward: [{name: math, kind: math}]
evaluations: [{name: words, source: words, samples: 2, max_new_tokens: 8}]
"""


def write_rows(path: Path, *prompts: str) -> None:
    info = json.dumps({"ground_truth": "4"})
    rows = [
        {"problem_id": f"{path.stem}-{i}", "task_type": "math", "prompt": prompt}
        | {"verification_info": info}
        for i, prompt in enumerate(prompts)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    folder = save_version(tmp_path / "model")
    build_warm_start_data(small_spec()).write_tokenizer(folder)
    (folder / "probe.json").unlink()  # as of a model from elsewhere
    return folder


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    write_rows(tmp_path / "words.jsonl", "one and one", "two and two", "three and one")
    write_rows(tmp_path / "trained.jsonl", "Two and two!", "four and none")
    path = tmp_path / "suite.yaml"
    path.write_text(SUITE)
    return path


@pytest.mark.slow
def test_a_suite_is_asked_of_any_model(weights: Path, suite: Path) -> None:
    # when a directory that no run made is evaluated
    done = runspec("evaluate", weights, "--suite", suite, "--overlap", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["words"]
    # then every problem has its answers, within the length that was asked for
    assert [each["problem_id"] for each in found["problems"]] == ["words-0", "words-1", "words-2"]
    assert all(0 < n <= 8 for each in found["problems"] for n in each["lengths"])
    assert set(found["figures"]) == {"mean", "pass-2", "majority", "length"}
    # and what is trained on is named
    assert found["overlap"] == [{"problem_id": "words-1", "exact": True, "trained": "trained-0"}]


def test_what_is_wrong_is_named_before_anything_starts(
    weights: Path, suite: Path, tmp_path: Path
) -> None:
    for words, message in (
        (("--suite", suite, "--set", "evaluations.words.source=none"), "no source none"),
        (("--suite", suite, "--set", "evaluations.words.smaples=2"), "unknown key"),
        ((), "no evaluation"),
    ):
        done = runspec("evaluate", weights, *words)
        assert done.returncode == 1 or done.returncode == 2
        assert message in done.stderr and "Traceback" not in done.stderr
    done = runspec("evaluate", "nothing@1", "--suite", suite, "--runs-dir", tmp_path)
    assert done.returncode == 1 and "no run 'nothing'" in done.stderr
    done = runspec("evaluate", "nothing@new", "--suite", suite, "--runs-dir", tmp_path)
    assert done.returncode == 2 and "no version: 'new'" in done.stderr
