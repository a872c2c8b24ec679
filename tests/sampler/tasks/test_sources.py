"""Sources of problems: every form gives the same ones, and hostile rows are named."""

from __future__ import annotations

import json
import logging
import os
import tracemalloc
from datetime import datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from runspec.core.errors import UserError
from runspec.core.schema import Source
from runspec.core.schema.source_files import source_files
from sampler.tasks.interfaces import ProblemSource, make_source
from sampler.tasks.prompts import PromptCodec
from sampler.tasks.task_set import Fitting, InSplit, split_of
from tests.sampler.tasks.conftest import laptop_spec
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

DATA = Path(__file__).parents[4] / "shared" / "data"
"""Folder beside the checkout, with data sets that are not part of the repository."""
RATE = {"field": "rate", "min": 0.125, "max": 0.5}


def read(one: Source, keep: KeepAll | None = None) -> ProblemSource:
    return make_source(one, 42, keep or KeepAll())


def refused(one: Source, message: str, place: str | None = None) -> UserError:
    """The refusal to read a source, which names a place."""
    with pytest.raises(UserError, match=message) as caught:
        read(one)
    assert place in (None, caught.value.place)
    return caught.value


def jsonl(folder: Path, rows: list[Row], **fields: Any) -> Source:
    return source("jsonl", write_jsonl(folder / "rows.jsonl", rows), **fields)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_problems_in_the_same_order(tmp_path, form):
    # given 31 rows in one of the forms
    made = read(FORMS[form](tmp_path, make_rows(31)))
    # when all are asked for, last first
    problems = [made.problem(i) for i in reversed(range(len(made)))][::-1]
    # then they are the rows, whatever files they came from
    assert [problem.problem_id for problem in problems] == [f"p-{i}" for i in range(31)]
    assert [problem.prompt for problem in problems] == [row["prompt"] for row in make_rows(31)]
    assert problems[30].verification == {"ground_truth": "60"}
    assert made.task_types == {"math"}


def test_blank_lines_and_a_byte_order_mark_are_no_rows(tmp_path):
    # given an editor's mark, a blank line before each row and one longer than a row after them
    rows = [json.dumps(row) for row in make_rows(3)]
    text = "\ufeff" + "".join(f"\n \t\r\n{row}\r\n" for row in rows) + " " * 400
    (tmp_path / "rows.jsonl").write_text(text, newline="")
    made = read(source("jsonl", tmp_path / "rows.jsonl"))
    # then problems are counted without them, and lines with them
    assert [made.problem(i).problem_id for i in (2, 0, 1)] == ["p-2", "p-0", "p-1"]
    (tmp_path / "rows.jsonl").write_text(text + "{", newline="")
    refused(source("jsonl", tmp_path / "rows.jsonl"), "not a JSON object", "rows.jsonl:10")


def test_columns_of_other_names_and_other_task_types_are_mapped(tmp_path):
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


def test_rows_of_another_data_set_are_mapped_column_by_column(tmp_path):
    # given rows that have no ids, no task types, and the truth in a column of its own
    rows = [{"Problem": "1 + 1?", "Answer": 2, "url": "x"}, {"Problem": "2 + 2?", "Answer": 4}]
    truth = {"ground_truth": "Answer"}
    params = {"prompt": "Problem", "verification_info": truth, "type": "math"}
    params["instruction"] = "Answer:"
    # when they are read by their own columns
    made = read(jsonl(tmp_path, rows, params=params))
    # then ids are numbers, and the values keep their types
    problems = [made.problem(i) for i in range(2)]
    assert [p.problem_id for p in problems] == ["rows-0", "rows-1"]
    assert [p.prompt for p in problems] == ["Answer:\n1 + 1?", "Answer:\n2 + 2?"]
    assert [p.verification for p in problems] == [{"ground_truth": 2}, {"ground_truth": 4}]
    assert made.task_types == {"math"}
    # and a row that lacks a column is named
    lacking = jsonl(tmp_path, [*rows, {"Problem": "3 + 3?"}], params=params)
    refused(lacking, "Answer is missing", "rows.jsonl:3")


@pytest.mark.parametrize(
    ("change", "message"),
    [
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
        ({"problem_id": "p-1"}, "problem_id 'p-1' is that of rows.jsonl:2 too"),
        ({"prompt": "x" * 100_000}, "more than 20000 bytes"),
        ("{", "not a JSON object: "),
        ("[1]", "not a JSON object: it is of type list"),
        ("\udcff", "not a JSON object: .*utf-8"),
        ("[" * 10_000, "not a JSON object: "),
    ],
)
def test_a_hostile_row_is_named_with_its_file_and_line(tmp_path, monkeypatch, change, message):
    if "20000 bytes" in message:
        monkeypatch.setattr("sampler.tasks.file_source.MAX_ROW_BYTES", 20000)
    rows = make_rows(6)
    lines = [json.dumps(row) for row in rows]
    lines[4] = change if isinstance(change, str) else json.dumps(rows[4] | change)
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines), errors="surrogateescape")  # the last line has no break
    refused(source("jsonl", path, solve_rate={"field": "rate"}), message, "rows.jsonl:5")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "2?", "answer": "two ####  "}, "answer has no number behind ####"),
        ({"question": "2?"}, "answer is missing"),
        ({"answer": "#### 2"}, "question is missing"),
    ],
)
def test_a_row_that_gsm8k_would_not_have_is_named(tmp_path, row, message):
    good = {"question": "1?", "answer": "#### 1"}
    path = write_jsonl(tmp_path / "rows.jsonl", [good, row])
    refused(source("gsm8k", path), message, "rows.jsonl:2")
    refused(source("gsm8k", path, params={"prompt": "question"}), "unknown: prompt")


@pytest.mark.parametrize(("split", "count", "first"), [("train", 7473, "72"), ("test", 1319, "18")])
def test_every_row_of_gsm8k_is_a_problem_with_its_number(split, count, first):
    path = DATA / f"gsm8k_{split}.jsonl"
    if not path.is_file():
        pytest.skip(f"no file {path}")
    made = read(source("gsm8k", path))
    problems = [made.problem(i) for i in range(len(made))]
    assert problems[0].verification == {"ground_truth": first}
    assert problems[7].problem_id == "rows-7"
    assert {problem.task_type for problem in problems} == made.task_types == {"math"}
    assert all("####" not in problem.prompt for problem in problems)
    numbers = [float(problem.verification["ground_truth"]) for problem in problems]
    assert len(numbers) == count  # each is one, thousands' commas taken out


def test_verification_info_is_an_object_or_json_text_of_one(tmp_path):
    first, second = make_rows(2)
    second["verification_info"] = {"ground_truth": "2", "nested": [1, None]}
    made = read(jsonl(tmp_path, [first, second]))
    assert made.problem(0).verification == {"ground_truth": "0"}
    assert made.problem(1).verification == {"ground_truth": "2", "nested": [1, None]}
    # and what no pipe carries is named before anything is graded
    rows = [first | {"verification_info": {"due": datetime(2020, 1, 1)}}]
    path = write_parquet(tmp_path / "rows.parquet", rows)
    refused(source("parquet", path), r"verification_info is no JSON: .*datetime")


def test_a_dataset_may_hold_objects_and_large_texts(tmp_path):
    rows = [row | {"verification_info": {"ground_truth": "x"}} for row in make_rows(4)]
    table = pa.Table.from_pylist(rows)
    table = table.set_column(2, "prompt", table["prompt"].cast(pa.large_string()))
    folder = write_dataset(tmp_path / "saved", rows, shards=1)
    path = folder / "data-00000-of-00001.arrow"
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)
    assert read(source("hf_dataset", folder)).problem(3).verification == {"ground_truth": "x"}


def written(kind: str, folder: Path, rows: list[Row]) -> Path:
    """Rows in two files of a folder; the last of these."""
    if kind == "parquet":
        write_parquet(folder / "0.parquet", rows[: len(rows) // 2])
        return write_parquet(folder / "1.parquet", rows[len(rows) // 2 :], group=3)
    return write_dataset(folder, rows) / "data-00001-of-00002.arrow"


@pytest.mark.parametrize(
    ("kind", "message"),
    [("parquet", "cannot be read as Parquet"), ("hf_dataset", "cannot be read as an Arrow stream")],
)
def test_a_row_of_a_shard_a_missing_column_and_a_cut_file_are_named(tmp_path, kind, message):
    rows = make_rows(20)
    rows[17]["prompt"] = ""
    path = written(kind, tmp_path / "rows", rows)
    refused(source(kind, tmp_path / "rows"), "prompt is ''", f"{path.name}, row 8")

    lacking = [{k: v for k, v in row.items() if k != "prompt"} for row in make_rows(4)]
    written(kind, tmp_path / "lacking", lacking)
    refused(source(kind, tmp_path / "lacking"), "no column 'prompt'; there are problem_id, task_")

    path = written(kind, tmp_path / "cut", make_rows(50))
    path.write_bytes(path.read_bytes()[:900])
    refused(source(kind, tmp_path / "cut"), message, path.name)


def test_a_row_group_too_large_to_hold_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("runspec.core.rows.MAX_GROUP_BYTES", 1000)
    path = write_parquet(tmp_path / "rows.parquet", make_rows(200), group=200)
    refused(source("parquet", path), r"row group 0 is [0-9]+ bytes, more than 1000")


@pytest.mark.parametrize("form", ["one_jsonl", "one_parquet", "saved_dataset"])
def test_a_file_that_changes_under_a_run_is_noticed(tmp_path, form):
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


@pytest.mark.parametrize("kind", ["jsonl", "hf_dataset"])
def test_nothing_is_fetched_and_how_to_is_said(kind):
    for uri, remedy in (
        ("hf://datasets/org/name/data", "hf download --repo-type dataset org/name --local-dir DIR"),
        ("https://example.org/rows.jsonl", "fetch it once, then --set data.sources.rows.uri=DIR"),
    ):
        assert remedy in refused(source(kind, uri), "is not on this machine").remedy


@pytest.mark.parametrize(
    ("kind", "uri", "params", "message"),
    [
        ("jsonl", None, {}, "kind jsonl needs uri"),
        ("jsonl", "gone.jsonl", {}, "cannot read .*gone.jsonl: No such file"),
        ("jsonl", "gone/*.jsonl", {}, "no file is there"),
        ("jsonl", "empty", {}, "no file is there"),
        ("jsonl", "**/*.jsonl", {}, "a pattern has neither"),
        ("jsonl", "*/../../*.jsonl", {}, "a pattern has neither"),
        ("jsonl", "pipe", {}, "cannot read .*pipe: no plain file"),
        ("jsonl", "loop", {}, "cannot read .*loop"),
        ("jsonl", "*.json*", {}, r"matches a.jsonl and b.json: of a folder with both"),
        ("jsonl", "a.jsonl", {"split": "train"}, "unknown: split"),
        ("hf_dataset", "set", {}, r"holds the splits \['train'\], and split is None"),
        ("hf_dataset", "set", {"split": "no"}, r"holds the splits \['train'\], and split is 'no'"),
        ("hf_dataset", "set/train", {"split": "train"}, "is one split already"),
        ("hf_dataset", "set/train", {"promt": "question"}, "unknown: promt"),
    ],
)
def test_a_path_that_names_no_rows_says_why(tmp_path, kind, uri, params, message):
    for name in ("a.jsonl", ".hidden.jsonl", "b.json"):
        write_jsonl(tmp_path / name, make_rows(1))
    for name in ("empty", "c.jsonl"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    write_dataset_dict(tmp_path / "set", {"train": make_rows(3)})
    refused(source(kind, None if uri is None else tmp_path / uri, params=params), message)
    # and a pattern takes what a volunteer's copy of its files would
    assert list(source_files(source("jsonl", tmp_path / "*.jsonl"))) == ["a.jsonl"]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"_data_files": []}, "lists no data files"),
        ({"_data_files": [{"filename": "../rows.arrow"}]}, "lists '../rows.arrow', no file name"),
        ({"_data_files": [{"filename": "gone.arrow"}]}, "cannot read .*gone.arrow"),
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, "keeps a selection of rows"),
        ([], "not a JSON object"),
    ],
)
def test_a_dataset_whose_index_is_wrong_is_named(tmp_path, state, message):
    folder = write_dataset(tmp_path / "saved", make_rows(3))
    (folder / "state.json").write_text(json.dumps(state))
    refused(source("hf_dataset", folder), message)


# -- Rows that are left out: by solve rate, by prompt; remembered on disk --------------------------


def kept(one: Source, keep: KeepAll | Fitting | InSplit) -> list[str]:
    made = make_source(one, 42, keep)
    return [made.problem(i).problem_id for i in range(len(made))]


def test_rows_are_kept_by_their_solve_rate_and_the_others_counted(tmp_path, caplog):
    rows = make_rows(18)
    for i in (1, 2, 5):
        rows[i]["rate"] = None
    with caplog.at_level(logging.INFO):
        found = kept(jsonl(tmp_path, rows, solve_rate=RATE), KeepAll())
    assert found == [f"p-{i}" for i in (3, 4, 10, 11, 12, 13)]
    said = "6 to train on, 0 held out, 0 over-long, 9 left out by their solve rate, 3 without one"
    assert said in caplog.text
    # and where that leaves nothing, the counts and the remedy are said
    bounds = {"field": "rate", "min": 0.3, "max": 0.31}
    with pytest.raises(UserError, match=r"no problem is left: .* 15 left out") as error:
        kept(jsonl(tmp_path, rows, solve_rate=bounds), KeepAll())
    assert error.value.remedy.startswith("widen solve_rate")
    for form in ("one_jsonl", "one_parquet"):
        fields = FORMS[form](tmp_path, rows).model_dump()
        fields |= {"solve_rate": {**RATE, "field": "solved"}}
        refused(Source.model_validate(fields), "no column 'solved'")


@pytest.mark.parametrize("split", ["train", "held_out", None])
def test_over_long_prompts_are_left_out_for_whatever_length_is_asked_and_counted(
    tmp_path, tokenizer_dir, caplog, split
):
    # given problems of each split, of which some fit only with a target of one digit
    texts = [f"{'a' * (i % 30)}{i}" for i in range(120)]
    rows = [row | {"prompt": text} for row, text in zip(make_rows(120), texts, strict=True)]
    codec = PromptCodec.read(tokenizer_dir, laptop_spec().data)
    targets = [8, 16, 12345]
    lengths = [max(len(codec.prompt_tokens(t, target)) for target in targets) for t in texts]
    limit = sorted(lengths)[80]
    keep = Fitting(codec, targets, limit, split)
    # when they are filtered one by one, as a batch, and as a source's rows
    with caplog.at_level(logging.INFO):
        found = kept(jsonl(tmp_path, rows), keep)
    # then those of the split are kept whose prompt fits with every target
    fits = [i for i, length in enumerate(lengths) if length <= limit]
    wanted = [i for i in fits if split is None or split_of(texts[i]) == split]
    assert found == [f"p-{i}" for i in wanted]
    assert keep.many(texts) == [keep(text) for text in texts] == [i in wanted for i in range(120)]
    # and each split's count is that of the problems that a run would have
    held_out = sum(split_of(texts[i]) == "held_out" for i in fits) if split else 0
    assert held_out or not split
    said = f"{len(fits) - held_out} to train on, {held_out} held out, {120 - len(fits)} over-long"
    assert said in caplog.text


def test_too_few_problems_to_hold_any_out_is_said(tmp_path):
    with pytest.raises(UserError, match="2 to train on, 0 held out") as error:
        kept(jsonl(tmp_path, make_rows(2)), InSplit("held_out"))
    assert "add problems" in (error.value.remedy or "")


def test_what_is_kept_is_remembered_until_something_that_decides_it_changes(tmp_path, cache):
    def asked(rows: list[Row], rate: dict[str, Any] | None, digest: str = "all") -> int:
        keep = KeepAll()
        keep.digest = digest
        kept(jsonl(tmp_path, rows, solve_rate=rate), keep)
        return len(keep.asked)

    rows, others = make_rows(18), make_rows(18, start=9)
    # the same again is not looked at twice; under another filter, tokenizer or content all is
    assert [asked(rows, RATE), asked(rows, RATE)] == [8, 0]
    assert asked(rows, None) == 18
    assert asked(rows, RATE, "another tokenizer") == 8
    assert asked(others, RATE) == 8
    assert len(list(cache.iterdir())) == 4
    assert asked(rows, RATE) == 0


def flipped(data: bytes) -> bytes:
    at = data.index((16).to_bytes(8, "little"))
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def beyond_the_file(data: bytes) -> bytes:
    beyond = BytesIO()
    np.savez(beyond, rows=np.array([99], np.uint32), task_types=np.array(["math"]))
    return beyond.getvalue()


@pytest.mark.parametrize(
    "damage",
    [lambda data: b"", lambda data: b"[1]", lambda data: data[:-4], flipped, beyond_the_file],
)
def test_a_damaged_memory_is_made_anew(tmp_path, cache, damage):
    one = jsonl(tmp_path, make_rows(18))
    first = kept(one, KeepAll())
    [remembered] = cache.iterdir()
    remembered.write_bytes(damage(remembered.read_bytes()))
    keep = KeepAll()
    assert kept(one, keep) == first
    assert len(keep.asked) == 18


def test_without_a_place_to_remember_it_works_and_says_so(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert len(kept(jsonl(tmp_path, make_rows(3)), KeepAll())) == 3
    assert "the selected rows are not cached" in caplog.text


# -- Files larger than one would want to hold ------------------------------------------------------


@pytest.mark.parametrize("form", ["one_jsonl", "one_parquet", "saved_dataset"])
def test_a_source_holds_a_part_of_its_files(tmp_path, monkeypatch, form):
    # given 16 MB of long rows, and little room for what is read
    monkeypatch.setattr("runspec.core.rows._TOGETHER_BYTES", 2**20)
    monkeypatch.setattr("sampler.tasks.file_source.CACHED_BYTES", 2**20)
    rows = make_rows(400)
    for row in rows:
        row["verification_info"] = json.dumps({"tests": row["problem_id"].zfill(8) * 5_000})
    one = FORMS[form](tmp_path, rows)
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    # when all are read
    made = read(one)
    found = [made.problem(i).verification["tests"][:8] for i in range(400)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # then at no time was half of the files in memory; pages of a data set are mapped
    assert found == [row["problem_id"].zfill(8) for row in rows]
    assert peak < 8_000_000 or form == "saved_dataset"
    assert pa.total_allocated_bytes() - before < 4_000_000
