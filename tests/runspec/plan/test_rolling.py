"""Who is started again for a rolling change."""

from __future__ import annotations

import pytest

from runspec.core.spec.schema_fields import block_in, schema_fields
from runspec.plan.changes import READERS, Change, roles_to_restart


def change(path: str, change_class: str = "rolling") -> Change:
    return Change(path, 1, 2, "change", change_class)  # type: ignore[arg-type]


LEAVES = [
    path
    for path, field in schema_fields().items()
    if field.change == "rolling" and block_in(field.annotation) is None
]


@pytest.mark.parametrize("path", LEAVES)
def test_the_readers_of_every_rolling_field_are_known(path: str) -> None:
    assert any(f"{path}.".startswith(f"{known}.") for known in READERS)


def test_the_coordinator_comes_first_and_nobody_comes_twice() -> None:
    changes = [change("verify.lease_timeout"), change("verify.thresholds.bfloat16.gap")]
    assert roles_to_restart(changes) == ("coordinator", "validators", "samplers")
    assert roles_to_restart([change("verify.prefill_share")]) == ("coordinator", "validators")


def test_hot_changes_start_nobody_again() -> None:
    assert roles_to_restart([change("budget.max_hours", "hot")]) == ()
