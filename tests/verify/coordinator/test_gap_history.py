"""A worker whose gaps exceed rounding by little, in every submission: found out by their sum."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from runspec.common.files import write_atomic
from runspec.spec.resolved import dump_resolved
from runspec.spec.schema import CalibrationProfile, RunSpec
from tests.verify.audit.tampering import Copy
from tests.verify.calibration.profiles import document as signed
from tests.verify.calibration.profiles import made_profile
from tests.verify.coordinator.deployment import Site, tiny_spec
from tests.verify.coordinator.over_http import check, sample
from verify.coordinator.events import SubmissionJudged, WorkerQuarantined
from verify.coordinator.gap_history import excess_of, fault, is_fault
from verify.coordinator.policy import Policy
from verify.coordinator.state import Worker
from verify.formats.verdict import RolloutVerdict
from verify.gap_noise import GapNoise
from verify.ledger import Ledger
from verify.thresholds import FLOAT32

NOISE = GapNoise(cap=1e-3, mean=1e-4, probability=1e-3)
LIMIT = NOISE.largest_excess
ROWS = 4
"""Of a submission of the tiny run."""
A_THIRD = LIMIT / 2.5 / ROWS
"""Excess of a row: two submissions of such are within the worker's budget, and three not."""


def row(gap_excess: float | None) -> RolloutVerdict:
    return RolloutVerdict(
        *("ab" * 32, 0, 0, 0.0, 0.0, 0.0, 5, None, None, None, []), gap_excess=gap_excess
    )


def test_the_excess_of_a_submission_is_that_of_the_rows_that_were_recomputed() -> None:
    assert excess_of([row(0.01), row(None), row(-0.03)]) == pytest.approx(-0.02)
    assert excess_of([row(None)]) is None


@pytest.mark.parametrize(("excess", "limit"), [(None, LIMIT), (0.1, None)])
def test_what_was_not_recomputed_or_not_calibrated_is_no_fault(
    excess: float | None, limit: float | None
) -> None:
    assert fault(Worker(0, "near", gap_excess=1e9), excess, limit) == ""


def test_a_worker_is_at_fault_where_the_sum_is_beyond_its_limit() -> None:
    worker = Worker(0, "near", gap_excess=LIMIT / 2)
    assert fault(worker, 0.49 * LIMIT, LIMIT) == ""
    assert is_fault(fault(worker, 0.51 * LIMIT, LIMIT))
    assert not is_fault("seeded_sampling_submission: row 0: mean gap")


def calibrated(site: Site) -> RunSpec:
    """The tiny run, with limits that its root has signed for it."""
    spec = tiny_spec(steps=6)
    profile = made_profile(replace(FLOAT32, gap_noise=NOISE))
    item = CalibrationProfile(name="measured", document=signed(profile, site.root))
    learner = spec.learner.model_copy(update={"compute_dtype": "float32"})
    samplers = [pool.model_copy(update={"dtype": "float32"}) for pool in spec.samplers]
    identity = spec.identity.model_copy(update={"root_public_key": site.root.public_hex})
    verify = spec.verify.model_copy(update={"profiles": [item]})
    return spec.model_copy(
        update={"learner": learner, "samplers": samplers, "identity": identity, "verify": verify}
    )


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path, tiny_spec())
    write_atomic(site.run_dir / "spec.json", dump_resolved(calibrated(site)))
    site.publish(0)
    with site.origin():
        yield site


def of_ledger(run_dir: Path, kind: type[Any]) -> list[Any]:
    with closing(Ledger(run_dir / "state.db")) as ledger:
        return [event for event in ledger.events() if isinstance(event, kind)]


def test_the_policy_has_the_limits_of_calibrated_pools(site: Site) -> None:
    assert Policy.of(calibrated(site)).gap_limits == {"near": LIMIT, "far": LIMIT}
    assert Policy.of(tiny_spec()).gap_limits == {}


def test_the_sum_over_submissions_rejects_what_each_alone_does_not(site: Site) -> None:
    # given a worker whose gaps exceed rounding in each submission, and one whose gaps do not
    with site.serving():
        worker = site.worker()
        validator = site.client(site.validator)
        for _ in range(2):
            sample(site, *worker)
            check(site, validator, gap_excess=A_THIRD)
        honest = site.worker()
        site.publish(1)
        sample(site, *honest)
        check(site, validator, gap_excess=0.0)
    # when it goes on after a restart
    with site.serving():
        again = site.client(worker[0])
        sample(site, worker[0], again)
        check(site, site.client(site.validator), gap_excess=A_THIRD)
    # then the third is rejected, with the number that decided it
    judged = of_ledger(site.run_dir, SubmissionJudged)
    assert [event.accepted for event in judged] == [True, True, True, False]
    assert is_fault(judged[-1].reason)
    assert f"limit {LIMIT:.4g}" in judged[-1].reason
    # and its worker is in quarantine at once, the honest one is not
    assert [event.worker for event in of_ledger(site.run_dir, WorkerQuarantined)] == [
        worker[0].public_hex
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
            worker = site.worker()
            sample(site, *worker)
            check(site, site.client(site.validator))
        # when its pool is calibrated, and it goes on
        write_atomic(site.run_dir / "spec.json", dump_resolved(calibrated(site)))
        with site.serving():
            sample(site, worker[0], site.client(worker[0]))
            check(site, site.client(site.validator), gap_excess=0.001)
    # then the ledger says of each by what it was judged, and the audit follows
    judged = of_ledger(site.run_dir, SubmissionJudged)
    assert [(event.gap_excess, event.gap_limit) for event in judged] == [
        (None, None),
        (pytest.approx(0.001 * ROWS), LIMIT),
    ]
    assert Copy(site.run_dir, site).audit().findings == []
