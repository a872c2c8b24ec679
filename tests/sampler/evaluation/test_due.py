"""Which versions are evaluated."""

from __future__ import annotations

import pytest

from runspec.core.spec.schema import Evaluation, RunSpec
from sampler.evaluation.due import due, due_versions
from tests.verify.coordinator.deployment import tiny_spec

STEPS = 10


def spec(**fields: object) -> RunSpec:
    evaluation = Evaluation.model_validate({"name": "e", "source": "s", "every": 4, **fields})
    return tiny_spec(steps=STEPS).model_copy(update={"evaluations": [evaluation]})


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, [0, 4, 8, 10]),
        ({"at_start": False}, [4, 8, 10]),
        ({"at_end": False}, [0, 4, 8]),
        ({"every": 5, "at_end": False}, [0, 5]),
        ({"every": 100}, [0, 10]),
    ],
)
def test_versions_by_number_the_first_and_the_last(
    fields: dict[str, object], expected: list[int]
) -> None:
    assert due_versions(spec(**fields), -1, STEPS, ()) == expected


def test_only_new_ones_that_are_not_done() -> None:
    assert due_versions(spec(), 0, 8, {("e", 8)}) == [4]
    assert due(spec(), 8, {("e", 8)}) == []
    assert due(spec(), 8, {("other", 8)}) == spec().evaluations
