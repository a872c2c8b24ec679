"""A smoke of `python -m tests.campaigns islands_convergence`, with a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.campaigns import islands_convergence
from tests.campaigns.islands_convergence import PARALLEL, Campaign, Size, interval


def test_it_measures_each_variant_once_and_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a tiny campaign of two seeds, six steps of two updates
    monkeypatch.setitem(islands_convergence.SIZES, "tiny", Size(32, 1, 0, 0, (4e-3,)))
    monkeypatch.setattr(islands_convergence, "OUTER", {"dense": (0.7,), "sparse": (1.0,)})
    monkeypatch.setattr(islands_convergence, "BOUNDS", {"float32": 1.0, "sparse": 1.0})
    campaign = Campaign(
        tmp_path / "results.json",
        "tiny",
        tokens=6 * 2 * 4 * 128,
        seeds=2,
        updates=2,
        kinds=("float32", "sparse"),
        rows=1,
        held_out=4,
    )
    figures = campaign.figures()
    # then it has a part for each variant, with differences to the others
    assert list(figures) == [f"tiny {name}" for name in (PARALLEL, "float32", "sparse")]
    assert {"over data-parallel", "over float32"} <= figures["tiny sparse"].keys()
    assert figures["tiny sparse"]["bytes of a share"] == 132 * 4
    # and the search and both seeds in its file, better than a guess among six tokens
    kept = json.loads(campaign.results.read_text())
    assert len(kept) == 3 * 3 and max(kept.values()) < 6

    # when it is run again, then nothing is computed
    monkeypatch.setattr(Campaign, "_nats", None)
    assert campaign.figures() == figures
    # and a difference beyond its bound is an error
    monkeypatch.setattr(islands_convergence, "BOUNDS", {"float32": 0.0, "sparse": 1.0})
    with pytest.raises(RuntimeError, match=r"float32 over data-parallel .*beyond 0\.0%"):
        campaign.figures()


def test_the_interval_is_students() -> None:
    # given three values, whose quantile is 4.303
    low, high = interval(np.array([1.0, 2.0, 3.0]))
    assert (low, high) == pytest.approx((2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5), abs=1e-3)
