"""What differs between two specs, and what each difference does to a run."""

from __future__ import annotations

from typing import Any

import pytest

from runspec.core.spec.schema import RunSpec
from runspec.plan.changes import Change, difference, severest
from tests.runspec.local.fake_run import small_spec

OLD = small_spec()


def changed(*overrides: str) -> list[Change]:
    return difference(OLD, small_spec("small", 5, *overrides))


def with_values(spec: RunSpec, **values: Any) -> RunSpec:
    """A spec with top-level values replaced, without the linter's word on them."""
    return RunSpec.model_validate(spec.model_dump(mode="json", by_alias=True) | values)


@pytest.mark.parametrize(
    ("override", "change_class"),
    [
        ("budget.max_hours=2.5", "hot"),
        ("placement.restarts=9", "hot"),
        ("verify.prefill_share=0.5", "rolling"),
        ("verify.lease_timeout=70s", "rolling"),
        ("steps=6", "restart"),
        ("samplers.volunteers.replicas=3", "restart"),
        ("checkpoints.every=2", "restart"),
        ("checkpoints.dir=elsewhere", "newrun"),
        ("seed=7", "newrun"),
        ("optimizer.lr=2e-3", "newrun"),
        ("data.sources.spell_backward.params.max_word_len=7", "newrun"),
    ],
)
def test_the_class_is_that_of_the_field(override: str, change_class: str) -> None:
    (change,) = changed(override)
    assert (change.path, change.change_class) == (override.partition("=")[0], change_class)


def test_steps_may_only_be_raised() -> None:
    (change,) = difference(OLD, small_spec(steps=4))
    assert change.change_class == "newrun"
    why = "some may be trained or sampled already: it may only be raised"
    assert str(change) == f"steps: 5 there, 4 now ({why})"


def test_leases_may_only_become_larger() -> None:
    path = "samplers.volunteers.groups_per_submission"
    groups = OLD.samplers[0].groups_per_submission
    (more,), (fewer,) = changed(f"{path}={groups + 1}"), changed(f"{path}={groups - 1}")
    assert (more.change_class, fewer.change_class) == ("restart", "newrun")


def test_together_they_are_as_severe_as_the_severest() -> None:
    assert severest(changed("budget.max_hours=2.5", "verify.prefill_share=0.5")) == "rolling"
    assert severest(changed("budget.max_hours=2.5", "steps=6")) == "restart"
    assert severest(changed("seed=7", "steps=6")) == "newrun"


def test_an_item_of_a_named_list_is_added_and_removed_by_name() -> None:
    # given a relay that is new
    new = small_spec("small", 5, "broadcast.relays.second.upstream=[origin]")
    # then its values are added, without those that say nothing
    added = difference(OLD, new)
    assert {change.path: (change.kind, change.after) for change in added} == {
        "broadcast.relays.second.name": ("add", "second"),
        "broadcast.relays.second.upstream": ("add", ["origin"]),
    }
    assert severest(added) == "restart"
    # and the way back removes the same
    removed = difference(new, OLD)
    assert [(c.path, c.kind, c.before) for c in removed] == [
        (c.path, "remove", c.after) for c in added
    ]
    assert str(removed[0]) == 'broadcast.relays.second.name: "second" there, unset now'


def test_another_order_is_a_change_of_its_own() -> None:
    # given two rewards, whose sum depends on their order in the last bit
    tree = OLD.model_dump(mode="json", by_alias=True)
    swapped = with_values(OLD, reward=tree["reward"][::-1])
    names = [term["name"] for term in tree["reward"]]
    assert len(names) > 1
    # then the order differs and nothing else does
    (change,) = difference(OLD, swapped)
    assert (change.path, change.before, change.after) == ("reward", names, names[::-1])
    assert change.change_class == "newrun"


def test_a_profile_that_is_exchanged_is_a_rolling_change_and_shown_by_its_digest() -> None:
    # given the same spec with the contents of one profile, and of another
    def holding(text: str) -> RunSpec:
        verify = OLD.model_dump(mode="json", by_alias=True)["verify"]
        profile = {"name": "measured", "file": "p.json", "document": text}
        return with_values(OLD, verify={**verify, "profiles": [profile]})

    (change,) = difference(holding("a" * 5000), holding("b" * 5000))
    assert (change.path, change.change_class) == ("verify.profiles.measured.document", "rolling")
    assert "5000 characters, BLAKE3" in str(change)
    assert len(str(change)) < 300
