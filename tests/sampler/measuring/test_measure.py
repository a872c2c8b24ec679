"""Solve rates: counted from grades, kept on disk line by line, written as rows."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from runspec.core.errors import UserError
from runspec.core.spec.schema import SamplerPool, Source
from sampler.engine.requests import Sampled, SampleRequest
from sampler.measuring.command import write_rows
from sampler.measuring.measure import Measurement, Tries, measure, open_progress
from sampler.tasks.interfaces import make_source
from tests.sampler.tasks.row_files import KeepAll
from verify.plugins import Graded, GradeItem, GraderFault, Problem

LOG = logging.getLogger("test")
ABOUT = {"model": "m", "samples": 4}
POOL = SamplerPool.model_validate(
    {"name": "p", "hardware": {"kind": "cpu"}, "max_model_len": 64, "max_new_tokens": 16}
)


class Tasks:
    """Problem i is solved by outputs that end with a number below i; 13's grader always fails."""

    eos_token_id, targets, data_digest = 1, [8], "d"

    def __len__(self) -> int:
        return 20

    def problem(self, index: int) -> Problem:
        return Problem(f"p-{index}", "math", f"what is {index}?", {"ground_truth": str(index)})

    def prompt_tokens(self, index: int, target: int | None) -> list[int]:
        assert target is None
        return [7] * (index + 1)

    def grade_all(self, items: Sequence[GradeItem]) -> list[Graded | GraderFault]:
        return [
            GraderFault("it hangs")
            if item.problem == 13
            else Graded(reward := float(item.output_tokens[-1] < item.problem), 0.0, reward)
            for item in items
        ]

    def close(self) -> None: ...


class Engine:
    """Answers the k-th try of a problem with the token 2 k, after the next submission or two."""

    capacity = 8

    def __init__(self) -> None:
        self.waiting: list[tuple[Future[list[Sampled]], list[Sampled]]] = []
        self.requests: list[SampleRequest] = []
        self.submitted = self.most = 0
        self.aborted = False

    def submit(self, requests: Sequence[SampleRequest]) -> Future[list[Sampled]]:
        future: Future[list[Sampled]] = Future()
        sampled: list[Any] = [
            type("S", (), {"output_tokens": np.array([2 * k])})() for k in range(len(requests))
        ]
        self.requests += requests
        self.submitted += len(requests)
        self.waiting.append((future, sampled))
        self.most = max(self.most, sum(len(s) for f, s in self.waiting if not f.done()))
        threading.Timer(0.005, lambda: future.set_result(sampled)).start()
        return future

    def abort(self) -> None:
        self.aborted = True


def asked(problems: int = 20) -> Measurement:
    return Measurement(Tasks(), POOL, samples=4, problems=problems, seed=3)


def run(path: Path, engine: Engine, problems: int = 20) -> dict[int, Tries]:
    with open_progress(path, ABOUT) as progress:
        assert measure(asked(problems), engine, progress, LOG, threading.Event())  # type: ignore[arg-type]
        return dict(progress.done)


def test_the_rate_is_the_share_of_tries_that_solve(tmp_path: Path) -> None:
    engine = Engine()
    done = run(tmp_path / "progress", engine)
    # tries give 0, 2, 4, 6: problem 3 is solved by two of them
    assert {index: one.rate for index, one in done.items() if index != 13} == {
        index: sum(2 * k < index for k in range(4)) / 4 for index in range(20) if index != 13
    }
    assert done[13] == Tries(13, 0, 0)
    assert done[13].rate is None
    assert engine.submitted == 80
    assert 8 < engine.most <= 2 * engine.capacity


def test_tries_differ_in_their_noise_alone_and_follow_from_seed_and_problem(
    tmp_path: Path,
) -> None:
    first, second = asked().requests(5), asked().requests(5)
    assert first == second
    assert len({request.noise_key for request in first}) == 4
    assert {request.noise_key for request in asked().requests(6)}.isdisjoint(
        request.noise_key for request in first
    )
    assert {tuple(request.prompt_tokens) for request in first} == {(7,) * 6}


def test_a_killed_measurement_goes_on_behind_its_last_whole_line(tmp_path: Path) -> None:
    # Given a progress of five problems, the last line cut by a kill
    path = tmp_path / "progress"
    whole = run(tmp_path / "other", Engine())
    run(path, Engine(), problems=5)
    path.write_bytes(path.read_bytes()[:-9])

    # When the same is measured again
    engine = Engine()
    done = run(path, engine)

    # Then only what is missing is tried, and the rates are those of one that ran through
    assert engine.submitted == 4 * 16
    assert done == whole
    lines = path.read_text().splitlines()
    assert len(lines) == 21
    assert sorted(json.loads(line)["index"] for line in lines[1:]) == list(range(20))


def test_a_progress_of_another_measurement_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "progress", Engine(), problems=2)
    with (
        pytest.raises(UserError, match="another model, data or settings"),
        open_progress(tmp_path / "progress", {**ABOUT, "samples": 8}),
    ):
        pass


def test_a_damaged_progress_is_refused(tmp_path: Path) -> None:
    run(tmp_path / "progress", Engine(), problems=2)
    with (tmp_path / "progress").open("a") as file:
        file.write('{"index": 3}\n')
    with pytest.raises(UserError, match="damaged"), open_progress(tmp_path / "progress", ABOUT):
        pass


def test_stopping_leaves_what_was_measured(tmp_path: Path) -> None:
    stop, engine = threading.Event(), Engine()
    stop.set()
    with open_progress(tmp_path / "progress", ABOUT) as progress:
        assert not measure(asked(), engine, progress, LOG, stop)  # type: ignore[arg-type]
    assert engine.aborted


def test_a_prompt_that_leaves_no_room_is_refused() -> None:
    tasks = Tasks()
    tight = POOL.model_copy(update={"max_model_len": 20})
    with pytest.raises(UserError, match="a prompt of 5 tokens leaves 15 of 20 for the 16 new ones"):
        Measurement(tasks, tight, 4, 20, 3).requests(4)


def test_the_rows_written_are_rows_of_a_source_with_a_filter(tmp_path: Path) -> None:
    # Given measured problems, one of them without a rate
    out = tmp_path / "rows.parquet"
    done = run(tmp_path / "progress", Engine())

    # When they are written and read as a source with bounds
    write_rows(out, Tasks(), done, field="solved", about=ABOUT)
    bounds = {"field": "solved", "min": 0.5, "max": 0.75}
    source = Source(name="rows", kind="parquet", uri=str(out), solve_rate=bounds)
    made = make_source(source, 1, KeepAll())

    # Then those in bounds are kept, and the file says how it was made
    kept = [made.problem(i) for i in range(len(made))]
    assert [problem.problem_id for problem in kept] == ["p-3", "p-4", "p-5", "p-6"]
    assert kept[0] == Tasks().problem(3)
    table = pq.read_table(out)
    assert table["solved"].to_pylist()[13] is None
    assert json.loads(table.schema.metadata[b"runspec.solve_rates"]) == ABOUT
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".tmp")] == []
