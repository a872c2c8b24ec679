"""The zero-variance filter looks at task rewards: noise in the length keeps no group alive."""

from __future__ import annotations

import pytest

from tests.verify.coordinator.filled import digest, key
from verify.coordinator.grading import grade_groups
from verify.formats.lease import Lease
from verify.formats.verdict import RolloutVerdict

SUBMISSION = digest("submission")
LEASE = Lease("run", 0, digest("n"), key("w"), "a", 0, 1, 0, digest("m"), 0.0, 1.0)


def outcome(task_rewards: list[float], penalties: list[float]) -> str:
    rows = [
        RolloutVerdict(SUBMISSION, number, 0, task, penalty, task + penalty, 10, 8, None, None, [])
        for number, (task, penalty) in enumerate(zip(task_rewards, penalties, strict=True))
    ]
    (grade,) = grade_groups(
        rows,
        submission=SUBMISSION,
        lease=LEASE,
        group_size=len(rows),
        dropped=[],
        zero_variance_filter=True,
    )
    return grade.outcome


@pytest.mark.parametrize(
    ("task_rewards", "penalties", "expected"),
    [
        ([1.0, 1.0, 1.0], [-0.1, -0.2, -0.3], "filtered"),  # only lengths differ
        ([0.0, 0.0, 0.0], [-0.1, -0.2, -0.3], "filtered"),
        ([1.0, 0.0, 1.0], [-0.1, -0.1, -0.1], "usable"),
        ([1.0, 0.5, 0.0], [-1.0, -0.5, 0.0], "usable"),  # rewards equal, task rewards not
    ],
)
def test_the_filter_asks_whether_task_rewards_differ(
    task_rewards: list[float], penalties: list[float], expected: str
) -> None:
    assert outcome(task_rewards, penalties) == expected
