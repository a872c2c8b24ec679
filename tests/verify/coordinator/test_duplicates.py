"""A rollout that another submission had before: the coordinator rejects it, restarted or not."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from tests.verify.audit.tampering import Copy
from tests.verify.coordinator.deployment import Site
from tests.verify.coordinator.over_http import check, sample
from verify.coordinator.duplicates import Seen, repeated_submission
from verify.coordinator.events import SubmissionJudged
from verify.formats.verdict import RolloutVerdict
from verify.ledger import Ledger


def row(number: int, *prints: int) -> RolloutVerdict:
    return RolloutVerdict(
        "ab" * 32, number, 0, 0.0, 0.0, 0.0, 5, None, None, None, [], list(prints)
    )


def test_the_first_row_that_repeats_is_named() -> None:
    seen = Seen()
    seen.add(3, "cd" * 32, [[1, 2], [], [2**63 - 1]])
    assert seen.fault([row(0, 5), row(1)]) == ""
    reason = seen.fault([row(0, 5), row(1, 7, 2, 1)])
    assert repeated_submission(reason) == "cd" * 32
    assert reason.startswith("duplicates: row 1: 2 runs of tokens of submission cdcd")
    assert seen.fault([row(-7, 5), row(-9, 7, 2, 1)]) == reason  # counted, whatever a row says


def test_a_validators_own_finding_names_no_other_submission() -> None:
    assert repeated_submission("duplicates: row 3: a run of tokens of row 1 (measured 1)") is None
    assert repeated_submission("") is None


def test_steps_that_can_train_no_more_are_forgotten() -> None:
    seen = Seen()
    for step in range(4):
        seen.add(step, f"{step:064x}", [[step]])
    seen.forget(2)
    assert [seen.fault([row(0, step)]) != "" for step in range(4)] == [False, False, True, True]


def judgements(run_dir: Path) -> dict[str, SubmissionJudged]:
    with closing(Ledger(run_dir / "state.db")) as ledger:
        return {e.submission: e for e in ledger.events() if isinstance(e, SubmissionJudged)}


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
    found = judgements(site.run_dir)
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
