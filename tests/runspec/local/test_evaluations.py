"""Evaluations in the report, the summary, the events and `wait`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from runspec.cli.wait import Awaited, holds, parse_awaited, why_never
from runspec.core.errors import UserError
from runspec.core.files import write_atomic
from runspec.core.keys import SigningKey
from runspec.core.run_files import evaluation_file, evaluation_files
from runspec.local.evaluations import (
    NewResults,
    evaluation_plots,
    newest,
    result_line,
    summarise_evaluations,
)
from runspec.local.snapshot import look_at
from tests.runspec.local.fake_run import prepared, small_spec
from verify.formats.evaluation import Evaluated, Figure, read_evaluations, sign_evaluation

ZERO = Evaluated(
    run="small",
    evaluation="held-out",
    version=0,
    model_digest="a" * 64,
    figures={
        "mean": Figure(0.25, 0.2, 0.3),
        "pass-2": Figure(0.4, 0.3, 0.5),
        "pass-4": Figure(0.5, 0.4, 0.6),
        "length": Figure(20.0, None, None),
    },
    faults=0,
    problems=[],
    finished=1.7e9,
    wall_s=2.0,
    cpu_s=1.5,
)
TWO = replace(ZERO, version=2, figures={**ZERO.figures, "mean": Figure(0.75, 0.7, 0.8)}, faults=3)


def store(run_dir: Path, *results: Evaluated) -> None:
    key = SigningKey.generate()
    for result in results:
        path = evaluation_file(run_dir, result.evaluation, result.version)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, sign_evaluation(result, key))


def test_results_are_read_by_evaluation_and_version(tmp_path: Path) -> None:
    other = replace(ZERO, evaluation="aime")
    ten = replace(ZERO, version=10)
    store(tmp_path, ten, TWO, other, ZERO)
    found = read_evaluations(evaluation_files(tmp_path))
    assert [(each.evaluation, each.version) for each in found] == [
        *(("aime", 0), ("held-out", 0), ("held-out", 2), ("held-out", 10))
    ]
    assert newest(found) == {"aime": other, "held-out": ten}


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    store(tmp_path, ZERO)
    path = evaluation_file(tmp_path, "held-out", 0)
    path.write_bytes(path.read_bytes().replace(b'"faults":0', b'"faults":1'))
    with pytest.raises(UserError, match="signature does not match") as caught:
        read_evaluations([path])
    assert caught.value.place == str(path)


def test_a_line_has_every_figure_with_its_interval() -> None:
    assert result_line(TWO) == (
        "version 2: mean 0.75 (0.7 to 0.8), pass-2 0.4 (0.3 to 0.5), pass-4 0.5 (0.4 to 0.6), "
        "length 20, 3 answers without a grade"
    )


def test_the_summary_has_the_figures_by_version() -> None:
    found = summarise_evaluations([ZERO, TWO])["held-out"]
    assert [(each["version"], each["mean"]) for each in found] == [
        *((0, [0.25, 0.2, 0.3]), (2, [0.75, 0.7, 0.8]))
    ]


def test_the_report_draws_each_evaluation_over_versions() -> None:
    plots = evaluation_plots([ZERO, TWO])
    assert [plot.title for plot in plots] == [
        *("held-out: task reward", "held-out: pass@k", "held-out: length")
    ]
    mean, several, length = (plot.curves for plot in plots)
    assert list(mean[0].points) == [(0, 0.25), (2, 0.75)]
    assert list(mean[0].band) == [(0, 0.2, 0.3), (2, 0.7, 0.8)]
    assert [curve.label for curve in several] == ["pass-2", "pass-4"]
    assert list(length[0].band) == []


def test_each_new_result_is_told_of_once(tmp_path: Path) -> None:
    store(tmp_path, ZERO)
    new = NewResults(tmp_path)
    assert new.lines() == []
    store(tmp_path, TWO)
    assert new.lines() == [f"held-out of {result_line(TWO)}"]
    assert new.lines() == []


@pytest.mark.parametrize(
    ("text", "holds_at"),
    [
        ("evaluation:held-out>0.6", 2),
        ("evaluation:held-out.mean>0.2", 0),
        ("evaluation:held-out.length<20.5", 0),
        ("evaluation:held-out.pass-4>0.6", None),
        ("evaluation:held-out.pass-8>0.1", None),
    ],
)
def test_a_figure_can_be_waited_for(tmp_path: Path, text: str, holds_at: int | None) -> None:
    with prepared(small_spec(), tmp_path) as run:
        awaited = parse_awaited(text)
        for result in (ZERO, TWO):
            assert holds(awaited, look_at(run.directory)) == (
                holds_at is not None and result.version > holds_at
            )
            store(run.directory, result)
        seen = look_at(run.directory)
        assert holds(awaited, seen) == (holds_at is not None)
        assert why_never(awaited, seen) is None


def test_an_evaluation_that_the_run_does_not_have_is_not_waited_for(tmp_path: Path) -> None:
    with prepared(small_spec(), tmp_path) as run:
        why = why_never(Awaited("evaluation", "aime"), look_at(run.directory))
    assert why == "the run has no evaluation 'aime'"
