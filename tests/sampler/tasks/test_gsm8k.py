"""GSM8K's own files: every row is a problem with its number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runspec.core.errors import UserError
from sampler.tasks.interfaces import make_source
from tests.sampler.tasks.row_files import KeepAll, source

DATA = Path(__file__).parents[4] / "shared" / "data"


@pytest.mark.parametrize(("split", "count", "first"), [("train", 7473, "72"), ("test", 1319, "18")])
def test_every_row_of_the_real_files_is_a_problem_with_its_number(
    split: str, count: int, first: str
) -> None:
    path = DATA / f"gsm8k_{split}.jsonl"
    if not path.is_file():
        pytest.skip(f"{path.name} is not in shared/data")
    made = make_source(source("gsm8k", path), 1, KeepAll())
    problems = [made.problem(i) for i in range(len(made))]
    assert len(problems) == count
    assert problems[0].verification == {"ground_truth": first}
    assert problems[7].problem_id == "rows-7"
    assert {problem.task_type for problem in problems} == made.task_types == {"math"}
    assert all("####" not in problem.prompt for problem in problems)
    numbers = [float(problem.verification["ground_truth"]) for problem in problems]
    assert len(numbers) == count  # each is one, thousands' commas taken out


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "2?", "answer": "two"}, "answer has no number behind ####: 'two'|no number"),
        ({"question": "2?", "answer": "two ####  "}, "answer has no number behind ####"),
        ({"question": "2?"}, "answer is missing"),
        ({"answer": "#### 2"}, "question is missing"),
    ],
)
def test_a_row_of_another_form_is_named(tmp_path: Path, row: dict[str, str], message: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "1?", "answer": "#### 1"}) + "\n" + json.dumps(row))
    with pytest.raises(UserError, match=message) as caught:
        make_source(source("gsm8k", path), 1, KeepAll())
    assert caught.value.place == "rows.jsonl:2"


def test_there_are_no_columns_to_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"question": "1?", "answer": "#### 1"}))
    with pytest.raises(UserError, match="unknown: prompt"):
        make_source(source("gsm8k", path, params={"prompt": "question"}), 1, KeepAll())
