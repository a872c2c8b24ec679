"""What Prometheus sees of evaluations."""

from __future__ import annotations

from sampler.evaluation.results import Results
from tests.figures import figures_of
from verify.formats.evaluation import Evaluated, Figure


def result(name: str, version: int, **figures: Figure) -> Evaluated:
    return Evaluated("run", name, version, None, figures, 0, [], 0.0, 2.0, 1.0)


def test_the_newest_version_and_its_figures() -> None:
    # given an evaluator that was started again after versions 0 and 10
    results = Results([("held-out", 10), ("held-out", 0), ("other", 0)])
    assert figures_of(results) == {
        "runspec_evaluator_newest_version/held-out": 10.0,
        "runspec_evaluator_newest_version/other": 0.0,
        "runspec_evaluator_busy_seconds_total": 0.0,
    }
    # when it has evaluated two further versions
    results.evaluated(result("held-out", 20, mean=Figure(0.1, 0.0, 0.2)))
    results.evaluated(result("held-out", 30, mean=Figure(0.5, None, None), length=Figure(7, 6, 8)))
    # then the last has taken the other's place; one problem alone has no interval
    assert figures_of(results) == {
        "runspec_evaluator_newest_version/held-out": 30.0,
        "runspec_evaluator_newest_version/other": 0.0,
        "runspec_evaluator_busy_seconds_total": 4.0,
        "runspec_evaluator_figure/held-out/mean/estimate": 0.5,
        "runspec_evaluator_figure/held-out/length/estimate": 7.0,
        "runspec_evaluator_figure/held-out/length/low": 6.0,
        "runspec_evaluator_figure/held-out/length/high": 8.0,
    }
