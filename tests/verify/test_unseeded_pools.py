"""A validator of an unseeded pool whose own prefill is at fault blames no worker."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from runspec.core.errors import UserError
from tests.verify.bench import MODEL, Bench
from tests.verify.test_checks import DamagedEngine, with_first
from verify.plugins import PrefillOutput


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path, trust="trusted", sampling={"temperature": 0.8, "seeded": False})
    bench.engine = DamagedEngine({0: MODEL}, tmp_path)
    return bench


@pytest.mark.parametrize(
    ("field", "value"),
    [("log_powers", np.nan), ("below_top", np.inf), ("end_most", np.nan), ("end_least", np.inf)],
)
def test_a_number_of_a_distribution_that_is_none_rejects_nobody(
    bench: Bench, field: str, value: float
) -> None:
    def damage(output: PrefillOutput) -> PrefillOutput:
        assert output.choices is not None
        damaged = with_first(getattr(output.choices, field), value)
        return replace(output, choices=output.choices._replace(**{field: damaged}))

    bench.engine.damage = damage
    with pytest.raises(UserError, match=rf"gave a distribution \({field}\) that is not finite"):
        bench.verdict(bench.honest())


def test_an_engine_that_says_nothing_of_distributions_is_named(bench: Bench) -> None:
    bench.engine.damage = lambda output: replace(output, choices=None)
    with pytest.raises(UserError, match="does not compute the distributions of unseeded tokens"):
        bench.verdict(bench.honest())
