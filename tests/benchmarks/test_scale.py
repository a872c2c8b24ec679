"""The tables of docs/scale.md are those that the program prints, and follow from its figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.scale import MODELS, loads, needed, saturated, step_s

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"


@pytest.mark.parametrize("rows", [saturated, needed])
def test_the_page_has_the_tables_of_the_program(rows):
    assert "\n".join(rows()) in PAGE.read_text(), "python -m benchmarks.scale"


def test_twice_the_workers_are_twice_the_load_and_half_a_steps_time():
    for model in MODELS:
        one, two = loads(model, 100), loads(model, 200)
        assert step_s(model, 200) == pytest.approx(step_s(model, 100) / 2)
        quadratic = "one relay of 1 Gbit/s (delta)"  # more workers, for steps that are shorter
        assert [two[part] / one[part] for part in one if part != quadratic] == pytest.approx(
            [2.0] * (len(one) - 1)
        )
        assert two[quadratic] == pytest.approx(4 * one[quadratic])


def test_a_larger_model_asks_more_of_all_but_the_coordinator():
    small, large = MODELS[1], replace(MODELS[1], parameters=65.6e9, active=65.6e9)
    grown = {part: loads(large, 10)[part] / load for part, load in loads(small, 10).items()}
    same = {part for part, times in grown.items() if times == pytest.approx(1.0)}
    assert same == {part for part in grown if part.startswith("coordinator")}
    assert all(grown[part] == pytest.approx(2.0) for part in grown.keys() - same)
