"""What follows from verdicts: grades, statistics, gaps in sum, repeated rollouts, reputation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.verify.coordinator.filled import STEADY, Filled, digest, key, policy, started
from verify.coordinator.machine import events
from verify.coordinator.machine.leases import LeaseRecord
from verify.coordinator.machine.state import State, Tally, Worker
from verify.coordinator.machine.transitions import apply
from verify.coordinator.machine.trust import EXACT_CHECKS, WORKERS_GAPS, Standing, reputation
from verify.coordinator.machine.verdicts import (
    History,
    Seen,
    VerdictMismatch,
    batch_stats,
    excess_of,
    gap_fault,
    grade_groups,
    is_gap_fault,
    repeated_submission,
)
from verify.formats.lease import Lease
from verify.formats.verdict import RolloutVerdict
from verify.thresholds import GapNoise

SUBMISSION = digest("submission")
LEASE = Lease("run", 0, digest("n"), key("w"), "a", 0, 2, 0, digest("m"), 0.0, 1.0)


# -- Grades and statistics -----------------------------------------------------------------------


def row(number: int, task: float, length: int = 10, *, target: int | None = 8) -> RolloutVerdict:
    values = (task, -0.5, task - 0.5, length, target, None, 0.125 * number, [])
    return RolloutVerdict(SUBMISSION, number, number // 2, *values)


ROWS = [row(0, 1.0), row(1, 0.0, 4), row(2, 1.0, 6, target=16), row(3, 1.0, 16, target=16)]


def grade(rows, *, dropped=(), filter_by="task"):
    return grade_groups(
        rows,
        submission=SUBMISSION,
        lease=LEASE,
        group_size=2,
        dropped=dropped,
        filter_by=filter_by,
    )


def test_groups_are_graded_by_the_validators_numbers():
    first, second = found = grade(ROWS)
    assert [(g.group, g.outcome) for g in found] == [(0, "usable"), (1, "filtered")]
    assert (first.rollouts, first.tokens, first.target) == (2, 14, 8)
    assert (first.task_reward, first.reward) == (0.5, 0.0)
    assert (first.length_error, second.length_error) == (3.0, 5.0)
    assert second.logprob_diff == 0.3125
    # without the filter equal rewards train, and a faulty grader drops a group
    assert [g.outcome for g in grade(ROWS, dropped=[0], filter_by=None)] == ["dropped", "usable"]
    # and what was not recomputed, or has no target, has no mean
    bare = [replace(each, logprob_diff=None, target=None) for each in ROWS]
    assert [(g.logprob_diff, g.length_error) for g in grade(bare)] == [(None, None)] * 2


@pytest.mark.parametrize(
    ("task_rewards", "penalties", "by_task", "by_whole"),
    [
        ([1.0, 1.0], [-0.1, -0.2], "filtered", "usable"),  # only lengths differ
        ([0.0, 0.0], [-0.1, -0.1], "filtered", "filtered"),
        ([1.0, 0.0], [-0.1, -0.1], "usable", "usable"),
        ([1.0, 0.5], [-1.0, -0.5], "usable", "filtered"),  # rewards equal, task rewards not
    ],
)
def test_the_filter_asks_whether_rewards_differ(task_rewards, penalties, by_task, by_whole):
    """Length keeps no group alive where the task rewards alone are compared."""
    rows = [
        replace(each, task_reward=task, length_penalty=penalty, reward=task + penalty)
        for each, task, penalty in zip(ROWS, task_rewards * 2, penalties * 2, strict=True)
    ]
    assert [group.outcome for group in grade(rows)] == [by_task] * 2
    assert [group.outcome for group in grade(rows, filter_by="whole")] == [by_whole] * 2


@pytest.mark.parametrize(
    ("rows", "dropped", "words"),
    [
        (ROWS[:3], (), "2 groups of 2 rows are needed"),
        ([*ROWS, row(4, 1.0)], (), "groups of 2 rows"),
        ([ROWS[1], ROWS[0], *ROWS[2:]], (), "numbered"),
        ([replace(ROWS[0], group=1), replace(ROWS[1], group=7), *ROWS[2:]], (), "2 rows"),
        ([replace(ROWS[0], group=1), *ROWS[1:]], (), "groups of 2 rows"),
        ([replace(ROWS[0], submission=digest("other")), *ROWS[1:]], (), "another submission"),
        *(
            ([replace(ROWS[0], **{name: value}), *ROWS[1:]], (), "finite")
            for name in ("task_reward", "length_penalty", "reward", "logprob_diff", "gap_excess")
            for value in (float("nan"), -float("inf"))
        ),
        ([replace(each, gap_excess=1e308) for each in ROWS], (), "finite"),
        (ROWS, (1, 2), "dropped_groups names a group that does not exist"),
    ],
)
def test_rows_must_be_those_of_the_submission(rows, dropped, words: str):
    with pytest.raises(VerdictMismatch, match=words):
        grade(rows, dropped=dropped)


def test_statistics_are_means_over_the_rollouts_of_all_graded_groups():
    graded = grade(ROWS) + grade(ROWS, dropped=[0, 1])
    tally = Tally(
        leased_groups=5,
        expired_groups=1,
        set_aside_groups=4,
        rejected_rollouts=6,
        rejected_submissions=2,
        grades=graded,
    )
    found = batch_stats(tally, opened=1.0, closed=2.0, busy_fraction=0.5)
    by_target = {"8": found["by_target"].pop("8"), "16": found["by_target"].pop("16")}
    assert by_target == {
        "8": {"rollouts": 2, "task_reward_mean": 0.5, "length_mean": 7.0},
        "16": {"rollouts": 2, "task_reward_mean": 1.0, "length_mean": 11.0},
    }
    means = {"task_reward_mean": 0.75, "reward_mean": 0.25, "length_mean": 9.0}
    means |= {"length_error_mean": 4.0, "logprob_diff_mean": 0.1875}
    groups = {"leased_groups": 5, "graded_groups": 2, "filtered_groups": 1, "dropped_groups": 6}
    rollouts = {"accepted_rollouts": 4, "rejected_rollouts": 6, "rejected_submissions": 2}
    others = {"opened": 1.0, "closed": 2.0, "expired_groups": 1, "sampler_busy_fraction": 0.5}
    assert found == means | groups | rollouts | others | {"by_target": {}}
    nothing = batch_stats(Tally(), opened=1.0, closed=2.0, busy_fraction=None)
    assert nothing["task_reward_mean"] is nothing["length_mean"] is None
    assert nothing["by_target"] == {}
    untargeted = Tally(grades=grade([replace(each, target=None) for each in ROWS]))
    stats = batch_stats(untargeted, opened=1.0, closed=2.0, busy_fraction=None)
    assert (stats["by_target"], stats["length_error_mean"]) == ({}, None)


def latencies(run: Filled) -> list[dict[str, object]]:
    """What the history says in the manifest of each step."""
    history, state, found = History(), State(run.state.policy), []
    for event in run.events:
        if isinstance(event, events.StepClosed):
            found.append(history.batch_stats(event.at, event.step, event.trained))
        state = apply(state, event)
        history.take(event, state.leases)
    return found


def test_overlapping_steps_count_all_that_was_accepted_while_they_were_open():
    run = Filled(policy(groups=2, lease_timeout_s=1000.0))
    run.register("x"), run.register("y"), run.publish(0)
    first = run.lease("x")
    run.now += 4.0
    second = run.lease("y")  # opens step 1: all of step 0 is leased
    assert (first.lease.step, second.lease.step) == (0, 1)
    run.submit(first), run.submit(second)
    run.now += 5.0
    run.judge(second, ["usable"] * 2)
    run.now += 1.0
    run.judge(first, ["usable"] * 2)
    run.advance()
    one, two = latencies(run)
    assert (one.pop("accepted_tokens_per_s"), two.pop("accepted_tokens_per_s")) == (4.0, 40 / 6.0)
    assert list(one.values()) == [5.5, 5.99, 6.0, 6.0]
    assert list(two.values()) == [None, None, 6.0, 6.0]


# -- Gaps of all submissions of a worker together ------------------------------------------------

NOISE = GapNoise(cap=1e-3, mean=1e-4, probability=1e-3)
LIMIT = NOISE.largest_excess
AGAIN = replace(NOISE, cap=NOISE.cap / 4)


def gaps(*excesses: float | None, recomputed: bool = True) -> list[RolloutVerdict]:
    diff = 0.001 if recomputed else None
    return [replace(ROWS[0], logprob_diff=diff, gap_excess=excess) for excess in excesses]


def worker(gap_excess: float) -> Worker:
    return Worker(0, "near", gap_excess=gap_excess, gap_noise=NOISE)


def test_the_excess_of_a_submission_is_that_of_the_rows_that_were_recomputed() -> None:
    rows = [*gaps(0.01, -0.03), *gaps(None, recomputed=False)]
    assert excess_of(rows, NOISE) == pytest.approx(-0.02)
    assert excess_of(gaps(None, recomputed=False), NOISE) is None
    assert excess_of(rows, None) is None
    # a validator that says nothing of gaps judges by another spec
    with pytest.raises(VerdictMismatch, match="another spec"):
        excess_of(gaps(0.01, None), NOISE)


@pytest.mark.parametrize(
    ("before", "excess", "noise", "after", "at_fault"),
    [
        (0.5, 0.2, NOISE, 0.7, False),
        (0.5, -0.2, NOISE, 0.3, False),
        (0.5, 0.49, NOISE, 0.99, False),
        (0.5, 0.51, NOISE, 1.0, True),
        (0.1, -7.0, NOISE, 0.0, False),  # honest work is no credit to cheat on
        (0.9, 7.0, NOISE, 1.0, True),  # one rejection, and the next honest one is accepted
        (1.0, None, NOISE, 1.0, False),  # it was not recomputed
        (1.0, 0.1, None, 1.0, False),  # its pool is not calibrated
    ],
)
def test_a_worker_is_at_fault_where_its_sum_is_beyond_the_limit(
    before: float, excess: float | None, noise: GapNoise | None, after: float, at_fault: bool
) -> None:
    nats = None if excess is None else excess * LIMIT
    reason = gap_fault(worker(before * LIMIT), nats, noise)
    assert is_gap_fault(reason) == at_fault == bool(reason)
    assert not at_fault or f"limit {LIMIT:.4g}" in reason
    found = worker(before * LIMIT).with_gaps(nats, noise)
    assert found.gap_excess == pytest.approx(after * LIMIT)
    assert gap_fault(found, -1e-9, NOISE) == ""


def test_a_sum_is_of_one_calibration() -> None:
    assert not is_gap_fault("seeded_sampling_submission: row 0: mean gap")
    # given a worker near its limit, when its pool is calibrated again, then its sum begins anew
    found = worker(0.9 * LIMIT).with_gaps(0.001, AGAIN)
    assert (found.gap_excess, found.gap_noise) == (0.001, AGAIN)
    assert gap_fault(worker(0.9 * LIMIT), AGAIN.largest_excess, AGAIN) == ""


# -- Rollouts that another submission had before -------------------------------------------------


def test_the_first_row_that_repeats_is_named_until_its_step_is_forgotten() -> None:
    def printed(*prints: int) -> RolloutVerdict:
        return replace(ROWS[0], fingerprints=list(prints))

    seen = Seen()
    seen.add(3, "cd" * 32, [[1, 2], [], [2**63 - 1]])
    seen.add(4, "ab" * 32, [[2, 9]])
    assert seen.fault([printed(5), printed()]) == ""
    reason = seen.fault([printed(5), printed(7, 2, 1)])
    assert repeated_submission(reason) == "cd" * 32
    assert reason.startswith("duplicates: row 1: 2 runs of tokens of submission cdcd")
    # a validator's own finding names no other submission
    assert repeated_submission("duplicates: row 3: a run of tokens of row 1 (measured 1)") is None
    seen.forget(3)
    assert repeated_submission(seen.fault([printed(2)])) == "cd" * 32
    seen.forget(4)
    assert repeated_submission(seen.fault([printed(2)])) == "ab" * 32
    seen.forget(5)
    assert seen.fault([printed(2)]) == ""


# -- Reputation, quarantine, ban -----------------------------------------------------------------

NOISY = ["logprobs: row 0: 0.2 > 0.1", "toploc: row 1: 40 > 38"]
EXACT = [f"{check}: row 0: 1 > 0" for check in sorted(EXACT_CHECKS | {WORKERS_GAPS})]
START, FLOOR = 0.8, 0.1


class Reputation(RuleBasedStateMachine):
    """One worker's deeds, beside the counts that docs/coordinator.md derives from them."""

    @initialize()
    def begin(self) -> None:
        many = {"groups": 9000, "max_groups": 10**6, "deadline_s": 1e9}
        self.run = started(**many, prefill_share=START, prefill_floor=FLOOR)
        self.accepted = self.rejected = self.withheld = self.late = 0
        self.row = self.proven = self.strikes = self.delivered = 0
        self.doubted = self.banned = False

    def lease(self) -> LeaseRecord:
        record = self.run.lease("x")
        assert record is not None and record.lease.groups == (1 if self.doubted else 2)
        return record

    def struck(self, record: LeaseRecord, why: str, what: str, *, exact: bool = False) -> None:
        self.row, self.strikes = 0, self.strikes + 1
        which = f"{why} (submission {digest('s', record.digest)[:16]} of step 0)"
        last = self.run.events[-1]
        if self.strikes >= 6:
            self.banned = True
            words = f"{self.strikes} submissions {what}, the last one for {which}"
            assert isinstance(last, events.KeyBanned) and last.reason == words
        elif not self.doubted and (exact or self.strikes >= 2):
            self.doubted = True
            assert isinstance(last, events.WorkerQuarantined) and last.reason == which

    @precondition(lambda self: not self.banned)
    @rule(
        recomputed=st.sampled_from([True, True, False]), late=st.sampled_from([False] * 3 + [True])
    )
    def accept(self, recomputed: bool, late: bool) -> None:
        record = self.lease()
        if late:
            self.run.record(events.LeaseOverdue(self.run.now, record.digest))
            self.late, self.delivered = self.late + 1, 0
        self.run.submit(record)
        outcomes = ["usable"] * record.lease.groups
        self.run.judge(record, outcomes, recomputed=recomputed)
        self.accepted += 1
        self.proven += recomputed
        self.row += recomputed or not self.doubted
        self.delivered += 0 if late else record.lease.groups
        if self.row >= 5:
            self.strikes, self.doubted = 0, False

    @precondition(lambda self: not self.banned)
    @rule(times=st.integers(4, 6))
    def work_well(self, times: int) -> None:
        for _ in range(times):
            self.accept(recomputed=True, late=False)

    @precondition(lambda self: not self.banned)
    @rule(reason=st.sampled_from(NOISY * 4 + EXACT))
    def reject(self, reason: str) -> None:
        record = self.lease()
        self.run.submit(record)
        self.run.judge(record, None, reason=reason)
        self.rejected, self.proven, self.delivered = self.rejected + 1, 0, 0
        self.struck(record, reason, "rejected", exact=reason in EXACT)

    @precondition(lambda self: not self.banned)
    @rule()
    def set_aside(self) -> None:
        record = self.lease()
        self.run.submit(record)
        self.run.set_aside(record)
        why = "set aside: validators came to no verdict on a submission"
        self.struck(record, why, "rejected or set aside")

    @precondition(lambda self: not self.banned)
    @rule()
    def withhold(self) -> None:
        self.lease()
        self.run.now += 30.0
        assert self.run.advance() == []
        self.withheld, self.proven, self.delivered = self.withheld + 1, 0, 0

    @precondition(lambda self: not self.banned)
    @rule()
    def give_back(self) -> None:
        self.run.release(self.lease())
        self.delivered = 0

    @rule()
    def ban_or_pardon(self) -> None:
        if self.banned:
            self.run.record(events.BanLifted(self.run.now, key("x"), "a GPU", events.BY_OPERATOR))
            self.banned, self.doubted, self.row, self.strikes = False, True, 0, 0
        else:
            self.run.record(events.KeyBanned(self.run.now, key("x"), "by hand", events.BY_OPERATOR))
            self.banned = True

    @invariant()
    def the_standing_follows_from_the_deeds(self) -> None:
        found = self.run.state.workers[key("x")].standing
        assert replace(found, quarantine=None) == Standing(
            *(self.accepted, self.rejected, self.withheld, self.row, self.proven),
            *(self.delivered, self.late, self.strikes),
        )
        assert (found.quarantine is not None) == self.doubted
        assert (key("x") in self.run.state.bans) == self.banned
        failures = self.rejected + self.withheld
        assert found.trust == self.delivered // (1 + failures + self.late)
        r = self.proven / (self.proven + 20 + 20 * failures)
        assert reputation(found) == r
        share = 1.0 if self.doubted or self.banned else START - (START - FLOOR) * r
        assert self.run.state.share_of(key("x")) == pytest.approx(share, abs=1e-12)


TestReputation = Reputation.TestCase
TestReputation.settings = settings(STEADY, max_examples=60)
