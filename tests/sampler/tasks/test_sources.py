"""Sources that read rows: every form gives the same problems, and what is malformed is named."""

from __future__ import annotations

import json
import os
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from runspec.core.errors import UserError
from runspec.core.spec.schema import Source
from runspec.core.spec.source_files import source_files
from sampler.tasks.interfaces import ProblemSource, make_source
from tests.sampler.tasks.row_files import (
    FORMS,
    KeepAll,
    Row,
    make_rows,
    source,
    write_dataset,
    write_dataset_dict,
    write_jsonl,
    write_parquet,
)


def read(one: Source) -> ProblemSource:
    return make_source(one, 42, KeepAll())


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_problems_in_the_same_order(tmp_path: Path, form: str) -> None:
    # Given 31 rows in one of the forms
    made = read(FORMS[form](tmp_path, make_rows(31)))

    # When all are asked for, last first
    problems = [made.problem(i) for i in reversed(range(len(made)))][::-1]

    # Then they are the rows, whatever files they came from
    assert [problem.problem_id for problem in problems] == [f"p-{i}" for i in range(31)]
    assert [problem.prompt for problem in problems] == [row["prompt"] for row in make_rows(31)]
    assert problems[30].verification == {"ground_truth": "60"}
    assert made.task_types == {"math"}


def test_verification_info_is_an_object_or_json_text_of_one(tmp_path: Path) -> None:
    first, second = make_rows(2)
    second["verification_info"] = {"ground_truth": "2", "nested": [1, None]}
    made = read(source("jsonl", write_jsonl(tmp_path / "rows.jsonl", [first, second])))
    assert made.problem(0).verification == {"ground_truth": "0"}
    assert made.problem(1).verification == {"ground_truth": "2", "nested": [1, None]}


def test_columns_of_other_names_and_other_task_types_are_mapped(tmp_path: Path) -> None:
    names = ("problem_id", "task_type", "prompt", "verification_info")
    params = {name: f"my_{name}" for name in names}
    rows = [
        dict(zip(params.values(), row, strict=True)) | {"prompt": "no"}
        for row in (("a", "verifiable_math", "1?", "{}"), ("b", "own", "2?", "{}"))
    ]
    path = write_parquet(tmp_path / "rows.parquet", rows)
    made = read(source("parquet", path, params=params, task_types={"verifiable_math": "math"}))
    problems = [made.problem(i) for i in range(2)]
    assert [(p.prompt, p.task_type) for p in problems] == [("1?", "math"), ("2?", "own")]
    assert made.task_types == {"math", "own"}


def test_rows_of_another_data_set_are_mapped_column_by_column(tmp_path: Path) -> None:
    # Given rows that have no ids, no task types, and the truth in a column of its own
    rows = [{"Problem": "1 + 1?", "Answer": 2, "url": "x"}, {"Problem": "2 + 2?", "Answer": 4}]
    params = {
        "prompt": "Problem",
        "verification_info": {"ground_truth": "Answer"},
        "type": "math",
        "instruction": "Answer:",
    }
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    # When they are read by their own columns
    made = read(source("jsonl", path, params=params))
    # Then ids are numbers, and the values keep their types
    problems = [made.problem(i) for i in range(2)]
    assert [p.problem_id for p in problems] == ["rows-0", "rows-1"]
    assert [p.prompt for p in problems] == ["Answer:\n1 + 1?", "Answer:\n2 + 2?"]
    assert [p.verification for p in problems] == [{"ground_truth": 2}, {"ground_truth": 4}]
    assert made.task_types == {"math"}
    # And a row that lacks a column is named
    write_jsonl(path, [*rows, {"Problem": "3 + 3?"}])
    with pytest.raises(UserError, match="Answer is missing") as caught:
        read(source("jsonl", path, params=params))
    assert caught.value.place == "rows.jsonl:3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"problem_id": None}, "problem_id is None, not a text"),
        ({"problem_id": 7}, "problem_id is 7, not a text"),
        ({"problem_id": ""}, "problem_id is '', not a text"),
        ({"problem_id": "x" * 513}, "a problem_id of 513 characters"),
        ({"task_type": 1.5}, "task_type is 1.5, not a text"),
        ({"prompt": ["a", "chat"]}, r"prompt is \['a', 'chat'\], not a text"),
        ({"problem_id": "a\ud800"}, "problem_id is no text: surrogates not allowed at 1"),
        ({"prompt": "\ud800"}, "prompt is no text"),
        ({"verification_info": {"a": float("nan")}}, "verification_info is no JSON"),
        ({"verification_info": "{"}, "verification_info is no JSON"),
        ({"verification_info": '{"a": NaN}'}, "NaN is no number of JSON"),
        ({"verification_info": "[1]"}, r"verification_info is \[1\], not an object"),
        ({"verification_info": "[" * 100_000}, "verification_info is no JSON"),
        ({"verification_info": None}, "verification_info is None, not an object"),
        ({"rate": 1.5}, "rate is 1.5, not a share from 0 to 1"),
        ({"rate": True}, "rate is True, not a share"),
        ({"rate": "0.5"}, "rate is '0.5', not a share"),
        ({"problem_id": "p-1"}, "problem_id 'p-1' is that of rows.jsonl:2 too"),
    ],
)
def test_a_malformed_row_is_named_with_its_file_and_line(
    tmp_path: Path, change: Row, message: str
) -> None:
    rows = make_rows(6)
    rows[4] |= change
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(UserError, match=message) as caught:
        read(source("jsonl", path, solve_rate={"field": "rate"}))
    assert caught.value.place == "rows.jsonl:5"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "an empty line"),
        ("{", "no JSON: "),
        ("[1]", "no JSON object"),
        ("\udcff", "no JSON: .*utf-8"),
        ("[" * 100_000, "no JSON: "),
    ],
)
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(1))
    with path.open("a", errors="surrogateescape") as file:
        file.write(f"{line}\n")
    with pytest.raises(UserError, match=message) as caught:
        read(source("jsonl", path))
    assert caught.value.place == "rows.jsonl:2"


def test_the_last_line_may_lack_its_line_break(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(3))
    path.write_bytes(path.read_bytes()[:-1])
    assert read(source("jsonl", path)).problem(2).problem_id == "p-2"


def test_rows_of_shards_are_counted_within_their_file(tmp_path: Path) -> None:
    rows = make_rows(20)
    rows[17]["prompt"] = ""
    write_parquet(tmp_path / "0.parquet", rows[:10])
    write_parquet(tmp_path / "1.parquet", rows[10:], group=3)
    with pytest.raises(UserError, match="prompt is ''") as caught:
        read(source("parquet", tmp_path))
    assert caught.value.place == "1.parquet, row 8"

    write_dataset(tmp_path / "saved", rows)
    with pytest.raises(UserError, match="prompt is ''") as caught:
        read(source("hf_dataset", tmp_path / "saved"))
    assert caught.value.place == "data-00001-of-00002.arrow, row 8"


def test_verification_that_no_pipe_carries_is_named_before_anything_is_graded(
    tmp_path: Path,
) -> None:
    rows = [row | {"verification_info": {"due": datetime(2020, 1, 1)}} for row in make_rows(1)]
    path = write_parquet(tmp_path / "rows.parquet", rows)
    with pytest.raises(UserError, match=r"verification_info is no JSON: .*datetime"):
        read(source("parquet", path))


def written(kind: str, folder: Path, rows: list[Row]) -> Path:
    """Rows in a folder; the last of its files."""
    if kind == "parquet":
        return write_parquet(folder / "rows.parquet", rows)
    return write_dataset(folder, rows) / "data-00001-of-00002.arrow"


@pytest.mark.parametrize(
    ("kind", "message"),
    [("parquet", "cannot be read as Parquet"), ("hf_dataset", "cannot be read as an Arrow stream")],
)
def test_a_file_without_a_column_or_cut_off_is_named(
    tmp_path: Path, kind: str, message: str
) -> None:
    lacking = [{k: v for k, v in row.items() if k != "prompt"} for row in make_rows(3)]
    written(kind, tmp_path / "lacking", lacking)
    with pytest.raises(UserError, match="no column 'prompt'; there are problem_id, task_type, ver"):
        read(source(kind, tmp_path / "lacking"))

    path = written(kind, tmp_path / "cut", make_rows(50))
    path.write_bytes(path.read_bytes()[:900])
    with pytest.raises(UserError, match=message) as caught:
        read(source(kind, tmp_path / "cut"))
    assert caught.value.place == path.name


def test_a_row_group_too_large_to_hold_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sampler.tasks.sources.parquet.MAX_GROUP_BYTES", 1000)
    path = write_parquet(tmp_path / "rows.parquet", make_rows(200), group=200)
    with pytest.raises(UserError, match=r"row group 0 is [0-9]+ bytes, more than 1000"):
        read(source("parquet", path))


def test_a_line_too_long_to_hold_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sampler.tasks.sources.jsonl.MAX_ROW_BYTES", 1000)
    rows = make_rows(5)
    rows[3]["prompt"] = "x" * 1000
    with pytest.raises(UserError, match="more than the 1000 that a row may have") as caught:
        read(source("jsonl", write_jsonl(tmp_path / "rows.jsonl", rows)))
    assert caught.value.place == "rows.jsonl:4"


@pytest.mark.parametrize("form", ["one_jsonl", "one_parquet", "saved_dataset"])
def test_a_file_that_changes_under_a_run_is_noticed(tmp_path: Path, form: str) -> None:
    one = FORMS[form](tmp_path, make_rows(31))
    made = read(one)
    path = next(path for path in source_files(one).values() if path.suffix != ".json")
    with path.open("ab") as file:
        file.write(b"\n")
    with pytest.raises(UserError, match="changed while the run reads it"):
        made.problem(3)
    path.unlink()
    with pytest.raises(UserError, match="cannot be read any more"):
        made.problem(3)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("hf://datasets/org/name/data", "hf download --repo-type dataset org/name --local-dir DIR"),
        ("https://example.org/rows.jsonl", "fetch it once, then --set data.sources.rows.uri=DIR"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "hf_dataset"])
def test_nothing_is_fetched_and_how_to_is_said(uri: str, message: str, kind: str) -> None:
    with pytest.raises(UserError, match="is not on this machine") as caught:
        read(source(kind, uri))
    assert message in caught.value.remedy


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        (None, "kind jsonl needs uri"),
        ("gone.jsonl", "cannot read .*gone.jsonl: No such file"),
        ("gone/*.jsonl", "no file is there"),
        ("empty", "no file is there"),
        ("**/*.jsonl", "a pattern has neither"),
        ("*/../../*.jsonl", "a pattern has neither"),
        ("pipe", "cannot read .*pipe: no plain file"),
        ("loop", "cannot read .*loop"),
    ],
)
def test_a_path_that_names_no_rows_says_why(tmp_path: Path, uri: str | None, message: str) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    with pytest.raises(UserError, match=message):
        read(source("jsonl", None if uri is None else tmp_path / uri))


def test_a_pattern_reads_what_a_volunteers_copy_of_its_files_would(tmp_path: Path) -> None:
    for name in ("a.jsonl", ".hidden.jsonl", "b.json"):
        write_jsonl(tmp_path / name, make_rows(1))
    (tmp_path / "c.jsonl").mkdir()

    assert list(source_files(source("jsonl", tmp_path / "*.jsonl"))) == ["a.jsonl"]
    with pytest.raises(UserError, match=r"matches a.jsonl and b.json: of a folder with both"):
        source_files(source("jsonl", tmp_path / "*.json*"))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "holds the splits \\['train'\\], and split is None"),
        ({"split": "dev"}, "holds the splits \\['train'\\], and split is 'dev'"),
    ],
)
def test_a_dataset_with_splits_needs_one_that_it_has(
    tmp_path: Path, params: dict[str, Any], message: str
) -> None:
    folder = write_dataset_dict(tmp_path / "saved", {"train": make_rows(3)})
    with pytest.raises(UserError, match=message):
        read(source("hf_dataset", folder, params=params))
    with pytest.raises(UserError, match="is one split already"):
        read(source("hf_dataset", folder / "train", params={"split": "train"}))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_data_files": []}, "lists no data files"),
        ({"_data_files": [{"filename": "../rows.arrow"}]}, "lists '../rows.arrow', no file name"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "cannot read .*gone.arrow"),
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, "keeps a selection of rows"),
        ([], "is no JSON object"),
    ],
)
def test_a_dataset_whose_index_is_wrong_is_named(
    tmp_path: Path, state: object, message: str
) -> None:
    folder = write_dataset(tmp_path / "saved", make_rows(3))
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(UserError, match=message):
        read(source("hf_dataset", folder))


def test_unknown_params_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(1))
    for params in ({"promt": "question"}, {"split": "train"}):
        with pytest.raises(UserError, match=f"unknown: {next(iter(params))}"):
            read(source("jsonl", path, params=params))


def test_a_dataset_may_hold_objects_and_large_texts(tmp_path: Path) -> None:
    rows = make_rows(4)
    table = pa.Table.from_pylist(rows).set_column(
        3, "verification_info", pa.array([{"ground_truth": "x"}] * 4)
    )
    table = table.set_column(2, "prompt", table["prompt"].cast(pa.large_string()))
    folder = write_dataset(tmp_path / "saved", rows, shards=1)
    path = folder / "data-00000-of-00001.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    assert read(source("hf_dataset", folder)).problem(3).verification == {"ground_truth": "x"}


DATA = Path(__file__).parents[4] / "shared" / "data"
"""Folder beside the checkout, with data sets that are not part of the repository."""


@pytest.mark.parametrize(("split", "count", "first"), [("train", 7473, "72"), ("test", 1319, "18")])
def test_every_row_of_the_real_files_is_a_problem_with_its_number(
    split: str, count: int, first: str
) -> None:
    path = DATA / f"gsm8k_{split}.jsonl"
    if not path.is_file():
        pytest.skip(f"no file {path}")
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
