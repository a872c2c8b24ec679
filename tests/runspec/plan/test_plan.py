"""Plans: what differs between two specs and does to a run, saved plans, and the compiler's part."""

from __future__ import annotations

import json
import stat
import sys
from typing import Any

import pytest

from learner_jax.aot import used_programs
from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.models.family import model_config
from runspec.core.schema import RunSpec
from runspec.core.schema.schema_fields import block_in, schema_fields
from runspec.plan import (
    READERS,
    AotReport,
    BadPlan,
    Change,
    SavedPlan,
    Seen,
    compile_step,
    difference,
    read_plan,
    roles_to_restart,
    save_plan,
    severest,
)
from tests.learner_jax.conftest import tiny_spec
from tests.runspec.local.fake_run import small_spec
from tests.runspec.supervised import supervised_spec

OLD = small_spec()
TREE = OLD.model_dump(mode="json", by_alias=True)


def changed(*overrides: str) -> list[Change]:
    return difference(OLD, small_spec("small", 5, *overrides))


def with_values(**values: Any) -> RunSpec:
    """The spec with top-level values replaced, without the linter's word on them."""
    return RunSpec.model_validate(TREE | values)


LEASE = "samplers.volunteers.groups_per_submission"
GROUPS = OLD.samplers[0].groups_per_submission


@pytest.mark.parametrize(
    ("change_class", "overrides"),
    [
        ("hot", ["budget.max_hours=2.5", "placement.restarts=9"]),
        ("rolling", ["verify.prefill_share=0.5", "verify.lease_timeout=70s"]),
        ("restart", ["steps=6", f"{LEASE}={GROUPS + 1}", "samplers.volunteers.replicas=3"]),
        ("restart", ["checkpoints.every=2"]),
        ("newrun", ["steps=4", f"{LEASE}={GROUPS - 1}"]),  # they may only be raised
        ("newrun", ["checkpoints.dir=elsewhere", "seed=7", "optimizer.lr=2e-3"]),
        ("newrun", ["data.sources.spell_backward.params.max_word_len=7"]),
    ],
)
def test_the_class_is_that_of_the_field(change_class, overrides):
    for override in overrides:
        (change,) = changed(override)
        assert (change.path, change.change_class) == (override.partition("=")[0], change_class)
    (change,) = changed("steps=4")
    why = "some may be trained or sampled already: it may only be raised"
    assert str(change) == f"steps: 5 there, 4 now ({why})"


def test_together_they_are_as_severe_as_the_severest():
    assert severest(changed("budget.max_hours=2.5", "verify.prefill_share=0.5")) == "rolling"
    assert severest(changed("budget.max_hours=2.5", "steps=6")) == "restart"
    assert severest(changed("seed=7", "steps=6")) == "newrun"


def test_an_item_of_a_named_list_is_added_and_removed_by_name():
    # given a relay that is new: its values are added, without those that say nothing
    new = small_spec("small", 5, "broadcast.relays.second.upstream=[origin]")
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


def test_a_pool_is_added_to_a_run_but_not_taken_out():
    pool = OLD.samplers[0].model_dump(mode="json") | {"name": "others"}
    new = with_values(samplers=[*TREE["samplers"], pool])
    assert severest(difference(OLD, new)) == "restart"
    assert severest(difference(new, OLD)) == "newrun"
    assert severest(difference(OLD, with_values(samplers=[pool]))) == "newrun"


def test_another_order_is_a_change_of_its_own():
    # given two rewards, whose sum depends on their order in the last bit
    names = [term["name"] for term in TREE["reward"]]
    (change,) = difference(OLD, with_values(reward=TREE["reward"][::-1]))
    assert (change.path, change.before, change.after) == ("reward", names, names[::-1])
    assert len(names) > 1 and change.change_class == "newrun"


def test_a_profile_that_is_exchanged_is_a_rolling_change_and_shown_by_its_digest():
    def holding(text: str) -> RunSpec:
        profile = {"name": "measured", "file": "p.json", "document": text}
        return with_values(verify={**TREE["verify"], "profiles": [profile]})

    (change,) = difference(holding("a" * 5000), holding("b" * 5000))
    assert (change.path, change.change_class) == ("verify.profiles.measured.document", "rolling")
    assert "5000 characters, BLAKE3" in str(change) and len(str(change)) < 300


def test_readers_of_a_rolling_field_are_known_and_the_coordinator_starts_again_first():
    for path, field in schema_fields().items():
        if field.change == "rolling" and block_in(field.annotation) is None:
            assert any(f"{path}.".startswith(f"{known}.") for known in READERS), path
    paths = "verify.lease_timeout", "verify.thresholds.bfloat16.gap"
    changes = [Change(path, 1, 2, "change", "rolling") for path in paths]
    assert roles_to_restart(changes) == ("coordinator", "validators", "samplers")
    changes = changed("verify.prefill_share=0.5", "budget.max_hours=2.5")
    assert roles_to_restart(changes) == ("coordinator", "validators")


PLAN = SavedPlan(OLD, Seen(3, "ab" * 32), 1700000000.25)


@pytest.fixture
def path(tmp_path):
    save_plan(tmp_path / "small.plan", PLAN)
    return tmp_path / "small.plan"


def test_a_plan_comes_back_as_it_was_saved(path):
    assert read_plan(path) == PLAN
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = json.loads(path.read_bytes())
    assert (content["run"], content["serial"]) == ("small", 3)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda plan: plan["spec"].update(seed=7), "was edited"),
        (lambda plan: plan.update(extra=1), "extra"),
        (lambda plan: plan.update(runspec="0.0.0"), "made by runspec '0.0.0'"),
        (lambda plan: plan.update(serial=True), "serial"),
    ],
)
def test_an_edited_plan_is_refused(path, edit, said):
    content = json.loads(path.read_bytes())
    edit(content)
    path.write_bytes(canonical_json(content))
    with pytest.raises(BadPlan, match=said) as refused:
        read_plan(path)
    assert refused.value.exit_code == 2
    assert "runspec plan -o" in str(refused.value)


@pytest.mark.parametrize("text", ['{"kind":"Plan"', '{"kind":"Plan","x":"\\ud800"}'])
def test_damage_is_named_and_never_a_traceback(tmp_path, text):
    (tmp_path / "bad.plan").write_text(text)
    with pytest.raises(BadPlan, match=r"bad\.plan"):
        read_plan(tmp_path / "bad.plan")


def compiled(spec: RunSpec, deadline_s: float = 1e4) -> AotReport:
    config = model_config(spec)
    assert config is not None
    return compile_step(spec, config, deadline_s=deadline_s)


def test_why_a_step_cannot_be_compiled_is_said(monkeypatch, tmp_path):
    # given a compiler that takes too long, and hardware that it does not know
    spec = tiny_spec()
    with pytest.raises(UserError, match=r"not compiled within 0\.01 s"):
        compiled(spec, deadline_s=0.01)
    hardware = spec.learner.hardware.model_copy(update={"kind": "tpu-v5p", "topology": "4"})
    learner = spec.learner.model_copy(update={"hardware": hardware})
    with pytest.raises(UserError, match="no TPU topology: 'v5p:4'"):
        compiled(spec.model_copy(update={"learner": learner}))
    # and an environment without JAX
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "jax", raising=False)
    with pytest.raises(UserError, match=r"whl\[learner\]"):
        compiled(spec)


def test_only_programs_that_a_run_uses_are_compiled():
    every = ("publish", "score", "accumulate", "apply")
    assert used_programs(tiny_spec()) == used_programs(supervised_spec()) == every
    never = supervised_spec(algorithm={"held_out": {"tokens": 0}})
    assert used_programs(never) == ("publish", "accumulate", "apply")
