"""Plans as files: what comes back is what was saved, and nothing that was edited is believed."""

from __future__ import annotations

import json
import random
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from runspec.core.canonical import canonical_json
from runspec.core.errors import UserError
from runspec.core.hashing import digest_bytes
from runspec.plan.saved import MAX_BYTES, BadPlan, SavedPlan, Seen, read_plan, save_plan
from tests.harness import TARGET_SHORT
from tests.runspec.local.fake_run import small_spec

PLAN = SavedPlan(small_spec(), Seen(3, "ab" * 32), 1700000000.25)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_plan(tmp_path / "small.plan", PLAN)
    return tmp_path / "small.plan"


def signed_again(content: dict[str, Any]) -> bytes:
    """What someone writes who knows how digests are made."""
    content.pop("digest", None)
    return canonical_json({**content, "digest": digest_bytes(canonical_json(content))})


def test_a_plan_comes_back_as_it_was_saved(path: Path) -> None:
    assert read_plan(path) == PLAN
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    content = json.loads(path.read_bytes())
    assert (content["run"], content["serial"]) == ("small", 3)


def test_white_space_is_no_content(path: Path) -> None:
    path.write_text(json.dumps(json.loads(path.read_bytes()), indent=2))
    assert read_plan(path) == PLAN


def test_a_spec_is_no_plan(tmp_path: Path) -> None:
    assert read_plan(TARGET_SHORT) is None
    flow = tmp_path / "spec.yaml"
    flow.write_text('{"version": "runspec/v1", "kind": "Run"}')
    assert read_plan(flow) is None


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


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "another run": lambda plan: plan.update(run="other"),
    "another spec's digest": lambda plan: plan.update(spec_digest="0" * 64),
    "no digest": lambda plan: plan.update(state_digest="../../etc"),
    "a serial below zero": lambda plan: plan.update(serial=-1),
    "an unknown key of the spec": lambda plan: plan["spec"].update(sede=1),
    "a name that is a path": lambda plan: (
        plan["spec"].update(name="../up"),
        plan.update(run="../up"),
    ),
}


@pytest.mark.parametrize("forge", FORGED.values(), ids=FORGED)
def test_what_does_not_fit_together_is_refused_even_with_a_good_digest(
    path: Path, forge: Callable[[dict[str, Any]], object]
) -> None:
    content = json.loads(path.read_bytes())
    forge(content)
    path.write_bytes(signed_again(content))
    with pytest.raises(BadPlan):
        read_plan(path)


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


def test_no_flipped_bytes_make_another_plan(path: Path) -> None:
    # given a plan in which a few bytes are others
    rng, whole = random.Random(4), path.read_bytes()
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 3)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data)
        # then it is refused, or no plan at all, or the plan that it was
        with suppress(BadPlan):
            assert read_plan(path) in (None, PLAN)


def test_a_file_larger_than_any_plan_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.plan"
    path.write_bytes(b'{"kind":"Plan","x":"' + b"x" * MAX_BYTES)
    with pytest.raises(UserError, match="larger than"):
        read_plan(path)
