"""Generated specs are clean; a change that breaks a rule is found, by those who should find it."""

from __future__ import annotations

from itertools import count, islice
from pathlib import Path

import pytest
import yaml

from runspec.core.spec.load import SpecFiles
from runspec.lint.check import check_spec
from runspec.lint.registry import RULES as REGISTERED
from tests.runspec.lint.generated import valid_spec
from tests.runspec.lint.mutations import files, fleet, learning, machines
from tests.runspec.lint.mutations.changes import Kind, Mutation

SPECS = 200
BROKEN = 5
"""Generated specs that each rule is broken in."""
ALL = files.FILES | learning.RULES | machines.RULES | fleet.RULES


def codes(folder: Path, text: str) -> set[str]:
    path = folder / "spec.yaml"
    path.write_text(text, encoding="utf-8")
    return {finding.code for finding in check_spec(SpecFiles(path)).findings}


def drawn(kinds: tuple[Kind, ...], number: int) -> list[int]:
    """The first seeds whose specs are of these kinds."""
    laptop = (
        seed for seed in count() if ("shape" in valid_spec(seed)["model"]) == (kinds == ("laptop",))
    )
    return list(islice(count() if len(kinds) == 2 else laptop, number))


@pytest.mark.parametrize("tenth", range(10))
def test_generated_specs_are_clean(tmp_path: Path, tenth: int) -> None:
    for seed in range(tenth, SPECS, 10):
        text = yaml.safe_dump(valid_spec(seed), sort_keys=False)
        assert codes(tmp_path, text) == set(), f"seed {seed}:\n{text}"


@pytest.mark.parametrize("code", ALL)
def test_a_broken_rule_is_found_by_itself(tmp_path: Path, code: str) -> None:
    mutation: Mutation = ALL[code]
    for seed in drawn(mutation.kinds, BROKEN):
        spec = valid_spec(seed)
        mutation.change(spec)
        found = codes(tmp_path, mutation.write(yaml.safe_dump(spec, sort_keys=False)))
        assert code in found, f"seed {seed}: {code} is silent"
        assert found <= {code} | mutation.also, f"seed {seed}"


def test_every_rule_is_broken_here() -> None:
    tables = [files.FILES, learning.RULES, machines.RULES, fleet.RULES]
    assert len(ALL) == sum(map(len, tables)), "a rule is in two tables"
    elsewhere = {"placement-scope"}  # of two files: tests/runspec/core/spec/test_placement_file.py
    assert set(ALL) | elsewhere == set(REGISTERED)
