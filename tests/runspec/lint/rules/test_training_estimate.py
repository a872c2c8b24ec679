"""Rules that use the estimate, on runs that train on documents."""

from __future__ import annotations

import pytest

from tests.runspec.core.spec.spec_files import EXAMPLES, find

DOCUMENTS = EXAMPLES / "documents.yaml"
PAID = "learner.hardware.price_per_hour=100", "learner.hardware.peak_flops=1e11", "steps=100000"


@pytest.mark.parametrize(
    ("overrides", "code"),
    [
        ((*PAID, "budget.max_cost=0.1"), "over-budget"),
        ((*PAID, "budget.max_hours=0.01"), "short-budget"),
        ((*PAID, "budget=null"), "no-budget"),
        (("learner.hardware.memory=40MB",), "step-fits"),
        (("learner.hardware.memory=500kB",), "train-state-fits"),
    ],
)
def test_what_time_money_and_memory_do_not_allow_is_found(
    overrides: tuple[str, ...], code: str
) -> None:
    assert code in {finding.code for finding in find(DOCUMENTS, *overrides)}
    assert code not in {finding.code for finding in find(DOCUMENTS)}
