"""Rows that are left out: by solve rate, by prompt, the same everywhere, remembered on disk."""

from __future__ import annotations

import logging
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest

from runspec.core.errors import UserError
from runspec.core.spec.schema import Source
from sampler.tasks.interfaces import make_source
from sampler.tasks.problems import Fitting, InSplit, split_of
from sampler.tasks.prompts import PromptCodec, PromptForm
from tests.sampler.tasks.conftest import laptop_spec
from tests.sampler.tasks.row_files import (
    KeepAll,
    make_rows,
    source,
    write_jsonl,
    write_parquet,
)
from verify.plugins import Split

RATE = {"field": "rate", "min": 0.125, "max": 0.5}


def kept(one: Source, keep: KeepAll) -> list[str]:
    made = make_source(one, 42, keep)
    return [made.problem(i).problem_id for i in range(len(made))]


def test_rows_whose_rate_is_null_are_left_out_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = make_rows(18)
    for i in (1, 2, 5):
        rows[i]["rate"] = None
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with caplog.at_level(logging.INFO):
        assert kept(source("jsonl", path, solve_rate=RATE), KeepAll()) == [
            f"p-{i}" for i in (3, 4, 10, 11, 12, 13)
        ]
    assert (
        "6 to train on, 0 held out, 0 over-long, 9 left out by their solve rate, 3 without one"
    ) in caplog.text


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_rows_without_the_column_are_an_error(tmp_path: Path, kind: str) -> None:
    rows = make_rows(3)
    write = write_jsonl if kind == "jsonl" else write_parquet
    path = write(tmp_path / f"rows.{kind}", rows)
    with pytest.raises(UserError, match="no column 'solved'"):
        kept(source(kind, path, solve_rate={**RATE, "field": "solved"}), KeepAll())


def test_a_filter_that_leaves_nothing_is_an_error_with_its_counts(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(9))
    bounds = {"field": "rate", "min": 0.3, "max": 0.31}
    with pytest.raises(UserError, match=r"no problem is left: 0 to train on.* 9 left out") as error:
        kept(source("jsonl", path, solve_rate=bounds), KeepAll())
    assert error.value.remedy == "widen solve_rate"


@pytest.mark.parametrize("split", ["train", "held_out", None])
def test_the_log_counts_what_is_trained_on_held_out_and_over_long(
    tmp_path: Path, tokenizer_dir: Path, caplog: pytest.LogCaptureFixture, split: Split | None
) -> None:
    # given 60 problems, some of each split over-long
    texts = [f"{'a' * (i % 20)}{i}" for i in range(60)]
    rows = [row | {"prompt": text} for row, text in zip(make_rows(60), texts, strict=True)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    codec = PromptCodec.read(tokenizer_dir, PromptForm.of(laptop_spec().data))
    lengths = codec.prompt_lengths(texts, None)
    limit = sorted(lengths)[45]
    with caplog.at_level(logging.INFO):
        found = kept(source("jsonl", path), Fitting(codec, [], limit, split))
    # then each split's count is that of the problems that a run would have
    fits = [text for text, length in zip(texts, lengths, strict=True) if length <= limit]
    held_out = sum(split_of(text) == "held_out" for text in fits) if split else 0
    trained, over_long = len(fits) - held_out, 60 - len(fits)
    assert over_long > 5
    said = f"{trained} to train on, {held_out} held out, {over_long} over-long"
    assert said in caplog.text
    assert len(found) == (held_out if split == "held_out" else trained)


def test_too_few_problems_to_hold_any_out_is_said(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(2))
    with pytest.raises(UserError, match="2 to train on, 0 held out") as error:
        kept(source("jsonl", path), InSplit("held_out"))
    assert "add problems" in (error.value.remedy or "")


def test_over_long_prompts_are_left_out_for_whatever_length_is_asked(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    # Given prompts of which some fit only with a target of one digit
    rows = make_rows(60)
    for i, row in enumerate(rows):
        row["prompt"] = "a" * i
    rows[0]["prompt"] = "b"
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    codec = PromptCodec.read(tokenizer_dir, PromptForm.of(laptop_spec().data))
    keep = Fitting(codec, [8, 16, 12345], 50, "train")

    # When they are filtered one by one and as a batch
    texts = [row["prompt"] for row in rows]
    many = keep.many(texts)
    made = make_source(source("jsonl", path), 42, keep)

    # Then those are kept whose prompt fits with every target
    fits = [
        max(len(codec.prompt_tokens(text, target)) for target in (8, 16, 12345)) <= 50
        for text in texts
    ]
    assert many == [keep(text) for text in texts]
    assert 5 < sum(many) < sum(fits) < 50  # a tenth is held out
    assert all(fit for fit, keep_it in zip(fits, many, strict=True) if keep_it)
    prompts = [made.problem(i).prompt for i in range(len(made))]
    assert prompts == [text for text, keep_it in zip(texts, many, strict=True) if keep_it]


def test_what_is_kept_is_remembered_until_something_that_decides_it_changes(
    tmp_path: Path, cache: Path
) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(18))
    first = kept(source("jsonl", path, solve_rate=RATE), KeepAll())
    [remembered] = cache.iterdir()

    # The same again: nothing is looked at twice
    again = KeepAll()
    assert kept(source("jsonl", path, solve_rate=RATE), again) == first
    assert again.asked == []

    # Another filter, another tokenizer, or another content: everything is
    kept(source("jsonl", path), again)
    other = KeepAll()
    other.digest = "another tokenizer"
    kept(source("jsonl", path, solve_rate=RATE), other)
    write_jsonl(path, make_rows(18, start=9))
    changed = KeepAll()
    assert kept(source("jsonl", path, solve_rate=RATE), changed) != first
    assert (len(again.asked), len(other.asked), len(changed.asked)) == (18, 8, 8)
    assert len(list(cache.iterdir())) == 4
    assert remembered.is_file()


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "rows beyond the file", "no zip"])
def test_a_damaged_memory_is_made_anew(tmp_path: Path, cache: Path, damage: str) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(18))
    first = kept(source("jsonl", path), KeepAll())
    [remembered] = cache.iterdir()
    data = bytearray(remembered.read_bytes())
    if damage == "cut":
        del data[-4:]
    elif damage == "flipped":
        at = data.index((16).to_bytes(4, "little") + (17).to_bytes(4, "little"))
        data[at] ^= 1
    elif damage == "rows beyond the file":
        beyond = BytesIO()
        np.savez(beyond, rows=np.array([99], np.uint32), task_types=np.array(["math"]))
        data = bytearray(beyond.getvalue())
    else:
        data = bytearray(b"" if damage == "empty" else b"[1]")
    remembered.write_bytes(data)
    keep = KeepAll()
    assert kept(source("jsonl", path), keep) == first
    assert len(keep.asked) == 18


def test_without_a_place_to_remember_it_works_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(3))
    assert len(kept(source("jsonl", path), KeepAll())) == 3
    assert "the selected rows are not cached" in caplog.text
