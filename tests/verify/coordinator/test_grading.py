"""Grades of groups, the statistics of a batch, and how busy the samplers were."""

from dataclasses import replace

import pytest

from tests.verify.coordinator.filled import digest, key
from verify.coordinator.machine.state import Tally
from verify.coordinator.machine.verdicts import VerdictMismatch, batch_stats, grade_groups
from verify.coordinator.services.activity import Activity
from verify.formats.lease import Lease
from verify.formats.verdict import RolloutVerdict

SUBMISSION = digest("submission")
LEASE = Lease("run", 0, digest("n"), key("w"), "a", 0, 2, 0, digest("m"), 0.0, 1.0)


def row(
    number: int, task_reward: float, length: int = 10, *, target: int | None = 8
) -> RolloutVerdict:
    return RolloutVerdict(
        SUBMISSION, number, number // 2, task_reward, -0.5, task_reward - 0.5, length, target, None,
        0.125 * number, [],
    )  # fmt: skip


ROWS = [row(0, 1.0), row(1, 0.0, 4), row(2, 1.0, 6, target=16), row(3, 1.0, 16, target=16)]


def grade(rows, *, dropped=(), filter=True):
    return grade_groups(
        rows,
        submission=SUBMISSION,
        lease=LEASE,
        group_size=2,
        dropped=dropped,
        zero_variance_filter=filter,
    )


def test_groups_are_graded_by_the_validators_numbers():
    first, second = grade(ROWS)

    assert (first.outcome, second.outcome) == ("usable", "filtered")
    assert (first.rollouts, first.tokens, first.target) == (2, 14, 8)
    assert (first.task_reward, first.reward) == (0.5, 0.0)
    assert first.length_error == 3.0
    assert second.logprob_diff == 0.3125
    # without the filter equal rewards train, and a faulty grader drops a group
    assert [g.outcome for g in grade(ROWS, dropped=[0], filter=False)] == ["dropped", "usable"]


@pytest.mark.parametrize(
    ("task_rewards", "penalties", "expected"),
    [
        ([1.0, 1.0], [-0.1, -0.2], "filtered"),  # only lengths differ
        ([0.0, 0.0], [-0.1, -0.2], "filtered"),
        ([1.0, 0.0], [-0.1, -0.1], "usable"),
        ([1.0, 0.5], [-1.0, -0.5], "usable"),  # rewards equal, task rewards not
    ],
)
def test_the_filter_asks_whether_task_rewards_differ(task_rewards, penalties, expected: str):
    """Noise in the length keeps no group alive."""
    rows = [
        replace(each, task_reward=task, length_penalty=penalty, reward=task + penalty)
        for each, task, penalty in zip(ROWS, task_rewards * 2, penalties * 2, strict=True)
    ]
    assert [group.outcome for group in grade(rows)] == [expected] * 2


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        (ROWS[:3], "groups of 2 rows"),
        ([*ROWS, row(4, 1.0)], "groups of 2 rows"),
        ([ROWS[1], ROWS[0], *ROWS[2:]], "numbered"),
        ([replace(ROWS[0], group=1), replace(ROWS[1], group=7), *ROWS[2:]], "groups of 2 rows"),
        ([replace(ROWS[0], submission=digest("other")), *ROWS[1:]], "another submission"),
        ([replace(ROWS[0], reward=float("inf")), *ROWS[1:]], "finite"),
        ([replace(ROWS[0], logprob_diff=float("nan")), *ROWS[1:]], "finite"),
    ],
)
def test_rows_must_be_those_of_the_submission(rows, words: str):
    with pytest.raises(VerdictMismatch, match=words):
        grade(rows)


def test_statistics_are_means_over_the_rollouts_of_all_graded_groups():
    tally = Tally(leased_groups=5, expired_groups=1, rejected_rollouts=4, grades=grade(ROWS))

    stats = batch_stats(tally, opened=1.0, closed=2.0, busy_fraction=0.5)

    assert stats["task_reward_mean"] == 0.75
    assert stats["length_mean"] == 9.0
    assert stats["length_error_mean"] == 4.0
    assert stats["by_target"]["16"] == {
        "rollouts": 2,
        "task_reward_mean": 1.0,
        "length_mean": 11.0,
    }
    assert (stats["graded_groups"], stats["filtered_groups"], stats["expired_groups"]) == (2, 1, 1)
    assert (stats["opened"], stats["closed"], stats["sampler_busy_fraction"]) == (1.0, 2.0, 0.5)
    nothing = batch_stats(Tally(), opened=1.0, closed=2.0, busy_fraction=None)
    assert nothing["task_reward_mean"] is None and nothing["by_target"] == {}


def rates(activity: Activity, now: float) -> tuple[float | None, list[float | None]]:
    """Mean busy fraction of the living, and tokens a second of each."""
    return activity.busy_fraction(now), [peer.tokens_per_s for peer in activity.peers.values()]


class TestRates:
    def test_they_count_from_one_heartbeat_to_the_next(self):
        activity = Activity()
        activity.heartbeat("x", {"busy_s": 5.0, "tokens": 100}, 10.0)
        activity.heartbeat("x", {"busy_s": 5.1, "tokens": 110}, 10.1)  # too soon for a rate
        assert rates(activity, 10.1) == (None, [None])
        activity.heartbeat("y", {"busy_s": 0.0, "tokens": 0}, 10.0)
        activity.heartbeat("x", {"busy_s": 10.0, "tokens": 300}, 20.0)
        activity.heartbeat("y", {"busy_s": 10.0, "tokens": 50}, 20.0)

        assert rates(activity, 20.0) == (0.75, [20.0, 5.0])
        # a worker that starts again counts from its start, odd numbers are none, the dead are out
        activity.heartbeat("x", {"busy_s": 0.5, "tokens": 10}, 30.0)
        activity.heartbeat("x", {"busy_s": 3.0, "tokens": 110}, 40.0)
        activity.heartbeat("y", {"busy_s": float("nan"), "tokens": 1e300}, 40.0)
        assert rates(activity, 40.0) == (0.25, [10.0, None])
        assert activity.busy_fraction(69.9) == 0.25 and activity.busy_fraction(70.0) is None

    def test_nothing_is_known_while_an_engine_starts_and_then_what_it_did_since(self):
        """Not 0 tokens a second, which an interval before the first lease would give."""
        activity = Activity()
        assert rates(activity, 0.0) == (None, [])
        for now in (0.0, 10.0, 20.0):
            activity.heartbeat("x", {"version": -1, "busy_s": 0.0, "tokens": 0}, now)
            assert rates(activity, now) == (None, [None])
        activity.heartbeat("x", {"version": 0, "busy_s": 0.0, "tokens": 0}, 28.0)
        activity.heartbeat("x", {"version": 0, "busy_s": 1.0, "tokens": 70}, 30.0)
        assert rates(activity, 30.0) == (None, [None])

        activity.heartbeat("x", {"version": 0, "busy_s": 9.0, "tokens": 700}, 38.0)
        assert rates(activity, 38.0) == (0.9, [70.0])

        # and an idle one has a rate, which is 0; one that starts again has none
        activity.heartbeat("x", {"version": 0, "busy_s": 9.0, "tokens": 700}, 48.0)
        assert rates(activity, 48.0) == (0.0, [0.0])
        activity.heartbeat("x", {"version": -1, "busy_s": 0.0, "tokens": 0}, 58.0)
        assert rates(activity, 58.0) == (None, [None])
