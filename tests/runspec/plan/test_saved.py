"""Plans as files: what comes back is what was saved, and nothing that was edited is believed."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from runspec.core.canonical import canonical_json
from runspec.plan.saved import BadPlan, SavedPlan, Seen, read_plan, save_plan
from tests.runspec.local.fake_run import small_spec

PLAN = SavedPlan(small_spec(), Seen(3, "ab" * 32), 1700000000.25)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_plan(tmp_path / "small.plan", PLAN)
    return tmp_path / "small.plan"


def test_a_plan_comes_back_as_it_was_saved(path: Path) -> None:
    assert read_plan(path) == PLAN
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = json.loads(path.read_bytes())
    assert (content["run"], content["serial"]) == ("small", 3)


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a value": (lambda plan: plan["spec"].update(seed=7), "was edited"),
    "the serial": (lambda plan: plan.update(serial=4), "was edited"),
    "a key more": (lambda plan: plan.update(extra=1), "extra"),
    "a key less": (lambda plan: plan.pop("created"), "created"),
    "another maker": (lambda plan: plan.update(runspec="0.0.0"), "made by runspec '0.0.0'"),
    "a wrong type": (lambda plan: plan.update(serial=True), "serial"),
}


@pytest.mark.parametrize(("edit", "said"), EDITS.values(), ids=EDITS)
def test_an_edited_plan_is_refused(
    path: Path, edit: Callable[[dict[str, Any]], object], said: str
) -> None:
    content = json.loads(path.read_bytes())
    edit(content)
    path.write_bytes(canonical_json(content))
    with pytest.raises(BadPlan, match=said) as refused:
        read_plan(path)
    assert refused.value.exit_code == 2
    assert "runspec plan -o" in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        '{"kind":"Plan"',
        '{"kind":"Plan","kind":"Plan"}',
        '{"kind":"Plan","x":' + "[" * 100 + "]" * 100 + "}",
        '{"kind":"Plan","created":1e999}',
        '{"kind":"Plan","x":"\\ud800"}',
    ],
)
def test_damage_is_named_and_never_a_traceback(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.plan"
    path.write_text(text)
    with pytest.raises(BadPlan, match=r"bad\.plan"):
        read_plan(path)
