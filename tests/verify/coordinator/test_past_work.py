"""What only the coordinator sees: gaps that are too large in sum, and rollouts handed in twice."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runspec.core.files import write_atomic
from runspec.core.spec.resolved import dump_resolved
from runspec.core.spec.schema import CalibrationProfile, RunSpec
from tests.verify.audit.tampering import Copy
from tests.verify.coordinator.deployment import Site, tiny_spec
from tests.verify.coordinator.over_http import check, sample
from tests.verify.profiles import document as signed
from tests.verify.profiles import made_profile
from verify.coordinator.ledger.ledger import Ledger
from verify.coordinator.machine.events import SubmissionJudged, WorkerQuarantined
from verify.coordinator.machine.gap_history import (
    AnotherCalibration,
    excess_of,
    fault,
    is_fault,
    with_gaps,
)
from verify.coordinator.machine.state import Worker
from verify.coordinator.machine.verdicts import Seen, repeated_submission
from verify.formats.verdict import RolloutVerdict
from verify.thresholds import FLOAT32, GapNoise

NOISE = GapNoise(cap=1e-3, mean=1e-4, probability=1e-3)
LIMIT = NOISE.largest_excess
ROWS = 4
"""Of a submission of the tiny run."""
A_THIRD = LIMIT / 2.5 / ROWS
"""Excess of a row: two submissions of such are within the worker's budget, and three not."""


def row(gap_excess: float | None = None, *prints: int, recomputed: bool = True) -> RolloutVerdict:
    diff = 0.001 if recomputed else None
    values = ("ab" * 32, 0, 0, 0.0, 0.0, 0.0, 5, None, None, diff, [], list(prints))
    return RolloutVerdict(*values, gap_excess=gap_excess)


def worker(gap_excess: float) -> Worker:
    return Worker(0, "near", gap_excess=gap_excess, gap_noise=NOISE)


def test_the_excess_of_a_submission_is_that_of_the_rows_that_were_recomputed() -> None:
    rows = [row(0.01), row(None, recomputed=False), row(-0.03)]
    assert excess_of(rows, NOISE) == pytest.approx(-0.02)
    assert excess_of([row(None, recomputed=False)], NOISE) is None
    assert excess_of(rows, None) is None
    # a validator that says nothing of gaps judges by another spec
    with pytest.raises(AnotherCalibration, match="another spec"):
        excess_of([row(0.01), row(None)], NOISE)


@pytest.mark.parametrize(("excess", "noise"), [(None, NOISE), (0.1, None)])
def test_what_was_not_recomputed_or_not_calibrated_is_no_fault(
    excess: float | None, noise: GapNoise | None
) -> None:
    assert fault(worker(LIMIT), excess, noise) == ""
    assert with_gaps(worker(0.1), excess, noise) == worker(0.1)


def test_a_worker_is_at_fault_where_the_sum_is_beyond_its_limit() -> None:
    assert fault(worker(LIMIT / 2), 0.49 * LIMIT, NOISE) == ""
    assert is_fault(fault(worker(LIMIT / 2), 0.51 * LIMIT, NOISE))
    assert not is_fault("seeded_sampling_submission: row 0: mean gap")


@pytest.mark.parametrize(
    ("before", "excess", "after"),
    [
        (0.5, 0.2, 0.7),
        (0.5, -0.2, 0.3),
        (0.1, -7.0, 0.0),  # honest work is no credit to cheat on
        (0.9, 7.0, 1.0),  # one rejection, and the next honest submission is accepted
    ],
)
def test_a_sum_stays_between_nothing_and_its_limit(
    before: float, excess: float, after: float
) -> None:
    found = with_gaps(worker(before * LIMIT), excess * LIMIT, NOISE)
    assert found.gap_excess == pytest.approx(after * LIMIT)
    assert fault(found, -1e-9, NOISE) == ""


def test_a_sum_is_of_one_calibration() -> None:
    # given a worker near its limit, when its pool is calibrated again
    again = replace(NOISE, cap=NOISE.cap / 4)
    found = with_gaps(worker(0.9 * LIMIT), 0.001, again)
    # then its sum begins anew
    assert (found.gap_excess, found.gap_noise) == (0.001, again)
    assert fault(worker(0.9 * LIMIT), 0.9 * again.largest_excess, again) == ""


def calibrated(site: Site, **changes: Any) -> RunSpec:
    """The tiny run, with limits that its root has signed for it."""
    spec = tiny_spec(steps=6)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
    limits = replace(FLOAT32, gap_noise=NOISE)
    profile = made_profile(limits, sampler={"sampling": sampling}, **changes)
    item = CalibrationProfile(name="measured", document=signed(profile, site.root))
    learner = spec.learner.model_copy(update={"compute_dtype": "float32"})
    samplers = [pool.model_copy(update={"dtype": "float32"}) for pool in spec.samplers]
    identity = spec.identity.model_copy(update={"root_public_key": site.root.public_hex})
    verify = spec.verify.model_copy(update={"profiles": [item]})
    return spec.model_copy(
        update={"learner": learner, "samplers": samplers, "identity": identity, "verify": verify}
    )


@pytest.fixture
def calibrated_site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, tiny_spec())
    write_atomic(site.run_dir / "spec.json", dump_resolved(calibrated(site)))
    site.publish(0)
    with site.origin():
        yield site


def of_ledger(run_dir: Path, kind: type[Any]) -> list[Any]:
    with closing(Ledger(run_dir / "state.db")) as ledger:
        return [event for event in ledger.events() if isinstance(event, kind)]


def test_the_sum_over_submissions_rejects_what_each_alone_does_not(calibrated_site: Site) -> None:
    site = calibrated_site
    # given a worker whose gaps exceed rounding in each submission, and one whose gaps do not
    with site.serving():
        doubtful = site.worker()
        validator = site.client(site.validator)
        for _ in range(2):
            sample(site, *doubtful)
            check(site, validator, gap_excess=A_THIRD)
        honest = site.worker()
        site.publish(1)
        sample(site, *honest)
        check(site, validator, gap_excess=0.0)
    # when it goes on after a restart
    with site.serving():
        again = site.client(doubtful[0])
        sample(site, doubtful[0], again)
        check(site, site.client(site.validator), gap_excess=A_THIRD)
    # then the third is rejected, with the number that decided it
    judged = of_ledger(site.run_dir, SubmissionJudged)
    assert [event.accepted for event in judged] == [True, True, True, False]
    assert is_fault(judged[-1].reason)
    assert f"limit {LIMIT:.4g}" in judged[-1].reason
    # and its worker is in quarantine at once, the honest one is not
    assert [event.worker for event in of_ledger(site.run_dir, WorkerQuarantined)] == [
        doubtful[0].public_hex
    ]
    # and whoever audits the ledger comes to the same
    run = Copy(site.run_dir, site)
    assert run.audit().findings == []

    # when the coordinator had let it pass, or had rejected what is within the limit
    def let_pass(rows: list[tuple[str, dict[str, Any]]]) -> None:
        last = [body for kind, body in rows if kind == "SubmissionJudged"][-1]
        last["gap_excess"] = 0.0

    run.rewrite(let_pass)
    # then the audit finds both the number and what did not follow from it
    found = {finding.what for finding in run.audit().findings}
    assert {"excess of gaps", "gaps of the worker"} <= found


def test_what_was_judged_before_a_pool_was_calibrated_stays_true(tmp_path: Path) -> None:
    # given a run whose first submission was judged under the published limits
    site = Site(tmp_path, tiny_spec(steps=6))
    site.publish(0)
    with site.origin():
        with site.serving():
            doubtful = site.worker()
            sample(site, *doubtful)
            check(site, site.client(site.validator))
        # when its pool is calibrated, and it goes on
        write_atomic(site.run_dir / "spec.json", dump_resolved(calibrated(site)))
        with site.serving():
            sample(site, doubtful[0], site.client(doubtful[0]))
            check(site, site.client(site.validator), gap_excess=0.001)
    # then the ledger says of each by what it was judged, and the audit follows
    judged = of_ledger(site.run_dir, SubmissionJudged)
    assert [(event.gap_excess, event.gap_noise) for event in judged] == [
        (None, None),
        (pytest.approx(0.001 * ROWS), NOISE),
    ]
    assert Copy(site.run_dir, site).audit().findings == []


# -- rollouts that another submission had before ---------------------------------------------------


def test_the_first_row_that_repeats_is_named() -> None:
    seen = Seen()
    seen.add(3, "cd" * 32, [[1, 2], [], [2**63 - 1]])
    assert seen.fault([row(None, 5), row()]) == ""
    reason = seen.fault([row(None, 5), row(None, 7, 2, 1)])
    assert repeated_submission(reason) == "cd" * 32
    assert reason.startswith("duplicates: row 1: 2 runs of tokens of submission cdcd")
    # a validator's own finding names no other submission
    assert repeated_submission("duplicates: row 3: a run of tokens of row 1 (measured 1)") is None
    assert repeated_submission("") is None


def test_the_second_of_two_alike_is_rejected_whatever_its_verdict_says(site: Site) -> None:
    # given two workers, of whom the second repeats a run of the first's tokens
    with site.serving():
        one, two = site.worker(), site.worker()
        validator = site.client(site.validator)
        first, _ = sample(site, *one)
        second, _ = sample(site, *two)
        # when a validator that looked at each alone accepts both
        assert check(site, validator, fingerprints=[11, 12]) == first
        assert check(site, validator, fingerprints=[99, 12]) == second
        # and a third repeats it after a restart
    with site.serving():
        third, _ = sample(site, one[0], site.client(one[0]))
        assert check(site, site.client(site.validator), fingerprints=[11]) == third
    # then the first alone may train, and the ledger says why
    found = {e.submission: e for e in of_ledger(site.run_dir, SubmissionJudged)}
    assert found[first].accepted and found[first].groups
    for copy in (second, third):
        assert not found[copy].accepted and found[copy].groups == ()
        assert found[copy].reason.startswith("duplicates: row 0: 1 runs of tokens of submission ")
        assert first in found[copy].reason
    # and whoever audits the ledger finds the same
    run = Copy(site.run_dir, site)
    assert run.audit().findings == []

    # when the coordinator names another submission than the one that is repeated
    def blame_each_other(rows: list[tuple[str, dict[str, Any]]]) -> None:
        for kind, body in rows:
            if kind == "SubmissionJudged" and body["submission"] == second:
                body["reason"] = body["reason"].replace(first, third)

    run.rewrite(blame_each_other)
    # then the audit finds that it was not there to be repeated
    assert "duplicates" in {finding.what for finding in run.audit().findings}
