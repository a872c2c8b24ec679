"""Solve rates: counted from grades, kept on disk line by line, written as rows of a source."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow.parquet as pq
import pytest

from runspec.core.errors import UserError
from runspec.core.schema import SamplerPool, Source
from sampler.__main__ import main
from sampler.engine.requests import Sampled, SampleRequest
from sampler.evaluation.ask import Questions
from sampler.evaluation.solve_rates import (
    Tries,
    measure,
    only_source,
    open_progress,
    unfiltered,
    write_rows,
)
from sampler.tasks.interfaces import make_source
from sampler.tasks.traces import build_warm_start_data
from tests.sampler.engine.models import save_version
from tests.sampler.tasks.conftest import SPECS, laptop_spec
from tests.sampler.tasks.row_files import KeepAll, make_rows, write_jsonl
from verify.plugins import Graded, GradeItem, GraderFault, Problem, TaskSet

LOG = logging.getLogger("test")
ABOUT = {"model": "m", "samples": 4}
POOL = SamplerPool.model_validate(
    {"name": "p", "hardware": {"kind": "cpu"}, "max_model_len": 64, "max_new_tokens": 16}
)


class Tasks(TaskSet):
    """Problem i is solved by outputs that end with a number below i; 13's grader always fails."""

    eos_token_id, targets, data_digest = 1, [8], "d"

    def __len__(self) -> int:
        return 20

    def problem(self, index: int) -> Problem:
        return Problem(f"p-{index}", "math", f"what is {index}?", {"ground_truth": str(index)})

    def prompt_tokens(self, index: int, target: int | None, seed: int = 0) -> list[int]:
        assert target is None
        return [7] * (index + 1)

    def answer(self, output_tokens: Sequence[int]) -> str:
        return str(output_tokens[-1])

    def grade_all(self, items: Sequence[GradeItem]) -> list[Graded | GraderFault]:
        return [
            GraderFault("it hangs")
            if item.problem == 13
            else Graded(reward := float(item.output_tokens[-1] < item.problem), 0.0, reward)
            for item in items
        ]


class FakeEngine:
    """Answers the k-th try of a problem with the token 2 k: at once, or, of a number of problems,
    only when four wait and when all were submitted."""

    capacity = 8

    def __init__(self, *_: object, problems: int = 0, **__: object) -> None:
        self.waiting: list[tuple[Future[list[Sampled]], list[Sampled]]] = []
        self.problems, self.submitted, self.most = problems, 0, 0
        self.aborted = False

    def load(self, weights_dir: Path, version: int) -> None:
        assert (weights_dir / "model.safetensors").exists() and version == 0

    def submit(self, requests: Sequence[SampleRequest]) -> Future[list[Sampled]]:
        future: Future[list[Sampled]] = Future()
        tokens = [np.array([2 * k]) for k in range(len(requests))]
        self.waiting.append((future, [SimpleNamespace(output_tokens=each) for each in tokens]))
        self.submitted += len(requests)
        self.most = max(self.most, sum(len(sampled) for _, sampled in self.waiting))
        last = self.submitted >= self.problems * len(requests)
        while self.waiting and (last or len(self.waiting) == 4):
            future_, sampled = self.waiting.pop(0)
            future_.set_result(sampled)
        return future

    def abort(self) -> None:
        self.aborted = True

    def close(self) -> None: ...


def asked(problems: int = 20, pool: SamplerPool = POOL) -> Questions:
    seed = ("solve rates", 3)
    return Questions(Tasks(), pool, 4, problems, seed, targets=())  # type: ignore[arg-type]


def run(path: Path, engine: FakeEngine, problems: int = 20) -> dict[int, Tries]:
    with open_progress(path, ABOUT) as progress:
        assert measure(asked(problems), engine, progress, LOG, threading.Event())  # type: ignore[arg-type]
        return dict(progress.done)


def test_the_rate_is_the_share_of_tries_that_solve(tmp_path):
    engine = FakeEngine(problems=20)
    done = run(tmp_path / "progress", engine)
    # tries give 0, 2, 4, 6: problem 3 is solved by two of them
    assert {index: one.rate for index, one in done.items() if index != 13} == {
        index: sum(2 * k < index for k in range(4)) / 4 for index in range(20) if index != 13
    }
    assert done[13] == Tries(13, 0, 0)
    assert done[13].rate is None
    assert engine.submitted == 80
    assert engine.most == 2 * engine.capacity  # one half is graded while the other is sampled


def test_tries_differ_in_their_noise_alone_and_follow_from_seed_and_problem():
    first = asked().requests(5)
    assert first == asked().requests(5)
    keys = {request.noise_key for request in first}
    assert len(keys) == 4
    assert keys.isdisjoint(request.noise_key for request in asked().requests(6))
    assert {tuple(request.prompt_tokens) for request in first} == {(7,) * 6}
    # and a prompt that leaves no room is refused
    tight = POOL.model_copy(update={"max_model_len": 20})
    with pytest.raises(UserError, match="a prompt of 5 tokens leaves 15 of 20 for the 16 new ones"):
        asked(pool=tight).requests(4)


def test_a_killed_measurement_goes_on_behind_its_last_whole_line(tmp_path):
    # given a progress of five problems, the last line cut by a kill
    path = tmp_path / "progress"
    whole = run(tmp_path / "other", FakeEngine())
    run(path, FakeEngine(), problems=5)
    path.write_bytes(path.read_bytes()[:-9])
    # when the same is measured again
    engine = FakeEngine()
    done = run(path, engine)
    # then only what is missing is tried, and the rates are those of one that ran through
    assert engine.submitted == 4 * 16
    assert done == whole
    lines = path.read_text().splitlines()
    assert len(lines) == 21
    assert sorted(json.loads(line)["index"] for line in lines[1:]) == list(range(20))


def test_a_progress_of_another_measurement_or_a_damaged_one_is_refused(tmp_path):
    path = tmp_path / "progress"
    run(path, FakeEngine(), problems=2)
    other = {**ABOUT, "samples": 8}
    with pytest.raises(UserError, match="another model, data"), open_progress(path, other):
        pass
    with path.open("a") as file:
        file.write('{"index": 3}\n')
    with pytest.raises(UserError, match="damaged"), open_progress(path, ABOUT):
        pass


def test_stopping_leaves_what_was_measured(tmp_path):
    stop, engine = threading.Event(), FakeEngine()
    stop.set()
    with open_progress(tmp_path / "progress", ABOUT) as progress:
        assert not measure(asked(), engine, progress, LOG, stop)  # type: ignore[arg-type]
    assert engine.aborted


def test_the_rows_written_are_rows_of_a_source_with_a_filter(tmp_path):
    # given measured problems, one of them without a rate
    out = tmp_path / "rows.parquet"
    done = run(tmp_path / "progress", FakeEngine())
    # when they are written and read as a source with bounds
    write_rows(out, Tasks(), done, field="solved", about=ABOUT)  # type: ignore[arg-type]
    bounds = {"field": "solved", "min": 0.5, "max": 0.75}
    rows = Source(name="rows", kind="parquet", uri=str(out), solve_rate=bounds)
    made = make_source(rows, 1, KeepAll())
    # then those in bounds are kept, and the file says how it was made
    kept = [made.problem(i) for i in range(len(made))]
    assert [problem.problem_id for problem in kept] == ["p-3", "p-4", "p-5", "p-6"]
    assert kept[0] == Tasks().problem(3)
    table = pq.read_table(out)
    assert table["solved"].to_pylist()[13] is None
    assert json.loads(table.schema.metadata[b"runspec.solve_rates"]) == ABOUT
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")] == []


# -- The command -----------------------------------------------------------------------------------


@pytest.fixture
def command(tmp_path, monkeypatch):
    """`sampler solve-rates` on a model without a probe, with words behind the usual ones."""
    model = save_version(tmp_path / "random")
    build_warm_start_data(laptop_spec()).write_tokenizer(model)
    monkeypatch.setattr("sampler.evaluation.solve_rates.stop_event", threading.Event)
    monkeypatch.setattr("sampler.engine.engine.Engine", FakeEngine)
    usual = [
        *("solve-rates", str(SPECS / "target_short.yaml"), "--profile", "laptop"),
        *("--source", "spell_backward", "--model", str(model)),
        *("--samples", "2", "--out", str(tmp_path / "rates.parquet")),
    ]
    return lambda *words: main([*usual, *words])


def test_the_command_goes_on_where_it_was_and_writes_a_row_for_each_problem(
    command, tmp_path, monkeypatch, capsys
):
    out, progress = tmp_path / "rates.parquet", tmp_path / "rates.parquet.progress"

    # given a measurement that ends before its rows are written
    def full(*_: object, **__: object) -> None:
        raise UserError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr("sampler.evaluation.solve_rates.write_rows", full)
        assert command("--limit", "6") == 1
    assert len(progress.read_bytes().splitlines()) == 7 and not out.exists()
    # when more problems are asked for, then it goes on behind those
    assert command("--limit", "9") == 0
    said = capsys.readouterr().err
    assert "continuing after 6 problems" in said and "9 of 9 problems" in said
    table = pq.read_table(out)
    names = "problem_id task_type prompt verification_info solve_rate"
    assert table.column_names == names.split()
    assert table["problem_id"].to_pylist() == [f"spell_backward-{i}" for i in range(9)]
    assert table["solve_rate"].to_pylist() == [0.0] * 9
    assert json.loads(table["verification_info"].to_pylist()[0])["dataset"] == "spell_backward"
    assert not progress.exists()
    # and the file is not written over
    assert command("--limit", "6") == 1
    assert "the file exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--source", "rows"], "no source 'rows'; there are spell_backward"),
        (["--samples", "0"], "--samples and --limit must be at least 1"),
        (["--pool", "gpu"], "no sampler pool 'gpu'"),
        (["--model", "/nowhere"], "cannot read the tokenizer"),
    ],
)
def test_what_cannot_be_measured_says_why(command, capsys, words, says):
    assert command(*words) == 1
    assert says in capsys.readouterr().err


def test_rows_are_measured_whatever_rate_they_have(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(9))
    solve_rate = "solve_rate: {field: rate, min: 0.1, max: 0.9}"
    spec = laptop_spec(f"data.sources.rows={{kind: jsonl, uri: {path.name}, {solve_rate}}}")

    chosen = only_source(spec, "rows", tmp_path)
    [source] = unfiltered(chosen).data.sources

    assert (source.name, source.uri, source.solve_rate) == ("rows", str(path), None)
    assert len(make_source(source, 1, KeepAll())) == 9
