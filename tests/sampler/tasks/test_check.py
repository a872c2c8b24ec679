"""`python -m sampler check`: what it finds in rows, plug-ins and graders before a role starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from runspec.core.spec.resolved import dump_resolved
from runspec.core.spec.schema import RunSpec
from sampler.tasks.check import check
from sampler.tasks.sources import file_source
from sampler.tasks.task_set import build_task_set
from sampler.tasks.traces import build_warm_start_data
from tests.sampler.tasks.conftest import laptop_spec
from tests.sampler.tasks.grading.plugin import install
from tests.sampler.tasks.row_files import Row, make_rows, write_jsonl


def spec_of(folder: Path, rows: list[Row], *overrides: str, kind: str = "math") -> RunSpec:
    """The laptop's run with problems of rows, graded by a reward `mine`."""
    path = write_jsonl(folder / "rows.jsonl", rows)
    return laptop_spec(
        f"data.sources={{spell_backward: null, words: {{kind: jsonl, uri: {path}}}}}",
        f"reward={{spelling: null, mine: {{kind: {kind}}}}}",
        *overrides,
    )


def found(spec: RunSpec) -> list[tuple[str, str]]:
    return [(fault.place, fault.thing) for fault in check(spec, None).faults]


def test_problems_that_are_right_are_counted_and_cached_for_the_roles(tmp_path: Path) -> None:
    rows = make_rows(100)
    rows[5]["prompt"] = "why " * 100
    spec = spec_of(tmp_path, rows)
    checked = check(spec, None)
    # Then they are counted, the over-long one too
    assert checked.faults == []
    assert checked.notes == ["source words: 88 to train on, 11 held out, 1 over-long"]
    # And the roles need not look through the rows again
    with patch.object(file_source, "_scan", side_effect=AssertionError):
        data = build_warm_start_data(spec)
        data.write_tokenizer(tmp_path)
        assert len(build_task_set(spec, tmp_path)) == 88


@pytest.mark.parametrize(
    ("change", "place", "said"),
    [
        ({"task_type": None}, "data.sources.words", "rows.jsonl:5: task_type is None, not a text"),
        (
            {"task_type": "maths"},
            "data.sources.words",
            "task_type 'maths' has no reward: 1 of 50 problems; rewards grade math",
        ),
        ({"verification_info": "{"}, "data.sources.words", "rows.jsonl:5: verification_info is no"),
    ],
)
def test_a_row_that_no_role_could_use_is_named(
    tmp_path: Path, change: dict[str, Any], place: str, said: str
) -> None:
    rows = make_rows(50)
    rows[4] |= change
    ((where, thing),) = found(spec_of(tmp_path, rows))
    assert (where, thing[: len(said)]) == (place, said)


def test_problems_that_are_all_over_long_are_a_fault(tmp_path: Path) -> None:
    ((place, thing),) = found(spec_of(tmp_path, make_rows(50), "data.max_prompt_tokens=4"))
    assert place == "data.sources.words"
    assert thing.startswith("no problem is left")
    assert thing.endswith("(data.max_prompt_tokens is 4)")


SOURCE = """\
class Rows:
    task_types = frozenset({"math"})

    def __init__(self, source, seed, keep):
        self.size = source.size

    def __len__(self):
        return self.size

    def problem(self, index):
        raise KeyError("question")
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        (
            "import no_such_module\n",
            "ModuleNotFoundError: No module named 'no_such_module' at {}:1",
        ),
        (SOURCE, "KeyError: 'question' at {}:11"),
    ],
)
def test_a_plugin_that_raises_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, said: str
) -> None:
    module = f"odd_{len(source)}"
    install(tmp_path, monkeypatch, module, f"[runspec.sources]\nodd = {module}:Rows\n", source)
    spec = laptop_spec("data.sources={spell_backward: null, words: {kind: odd, size: 3}}")
    ((place, thing),) = found(spec)
    assert place == "data.sources.words"
    assert thing == f"the plug-in of kind odd: {said.format(f'{tmp_path.name}/{module}.py')}"


def test_the_command_prints_bounded_json_whatever_plugins_print(tmp_path: Path) -> None:
    rows = make_rows(30)
    rows[3]["prompt"] = 7
    (tmp_path / "spec.json").write_bytes(dump_resolved(spec_of(tmp_path, rows)))
    command = [sys.executable, "-m", "sampler", "check", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [fault["thing"] for fault in told["faults"]] == ["rows.jsonl:4: prompt is 7, not a text"]
    assert " I check source words" in done.stderr


def test_prompts_are_measured_with_the_tokenizer_of_a_model_that_is_here(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    rows = make_rows(20)
    rows[5]["prompt"] = "why " * 100
    model = f"model={{hf: {tokenizer_dir}, shape: null}}"
    held_none_out = ("warm_start=null", "evaluations=null")
    spec = spec_of(tmp_path, rows, model, *held_none_out)
    assert check(spec, tokenizer_dir).notes == [
        "source words: 19 to train on, 0 held out, 1 over-long"
    ]
    with patch.object(file_source, "_scan", side_effect=AssertionError):
        assert len(build_task_set(spec, tokenizer_dir)) == 19
    # and without it the rows are read all the same
    del rows[5]["task_type"]
    spec = spec_of(tmp_path, rows, model, *held_none_out)
    assert [thing[:13] for _, thing in found(spec)] == ["rows.jsonl:6:"]
