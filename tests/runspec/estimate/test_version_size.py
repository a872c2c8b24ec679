"""What travels for a version, whole and as a delta."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from bridge.safetensors_io import write_safetensors
from bridge.weight_map import hf_shapes
from runspec.estimate.assumed import changed_share
from runspec.estimate.broadcast import delta_bytes, version_bytes, version_size
from tests.runspec.estimate.shipped import shipped

QWQ = shipped()[1]
LAPTOP = shipped(profile="laptop")[1]
DELTA = "broadcast.format=delta"


@pytest.mark.parametrize(
    ("dtype", "numpy"), [("float32", np.float32), ("bfloat16", ml_dtypes.bfloat16)]
)
def test_a_version_weighs_what_the_bridge_writes(tmp_path: Path, dtype: str, numpy: type) -> None:
    shapes = dict(hf_shapes(LAPTOP))

    zeros = (np.zeros(shape, numpy) for shape in shapes.values())
    write_safetensors(tmp_path / "model.safetensors", shapes, np.dtype(numpy), zeros)

    assert (tmp_path / "model.safetensors").stat().st_size == version_bytes(LAPTOP, dtype)


def test_at_one_percent_a_delta_is_what_was_measured_elsewhere() -> None:
    # 34 to 61 times smaller in experiments with other codes; this is what no code comes below by
    # much.
    whole, delta = version_bytes(QWQ, "bfloat16"), delta_bytes(QWQ, "bfloat16", 0.01)

    assert 61 < whole / delta < 70
    # Of 16 bits a changed element, 8.08 say which it is.
    assert delta == pytest.approx(32_763_876_352 * 0.01 * (2 + 8.08 / 8), rel=1e-3)


def test_followers_fetch_deltas_and_joiners_an_anchor_too() -> None:
    full = version_size(*shipped())
    deltas = version_size(*shipped(DELTA, "broadcast.anchor_every=10"))

    assert full.follower == full.joiner == full.whole == deltas.whole
    assert deltas.follower == deltas.delta == full.delta
    assert deltas.joiner == deltas.whole + 9 * deltas.delta


@pytest.mark.parametrize(
    ("overrides", "share", "source"),
    [
        ([], 0.01, "PULSE"),
        (["optimizer.lr=3e-6"], 3e-6 * 5120**0.5 * 256, "optimizer.lr"),
        (["optimizer.lr=3e-6", "learner.lora={}"], 0.01, "PULSE"),
        (["optimizer.lr=1e-3"], 1.0, "optimizer.lr"),
        (["broadcast.dtype=float32"], 1.0, "broadcast.dtype"),
        (["broadcast.dtype=float32", "estimate.changed_share=0.2"], 0.2, "estimate.changed_share"),
    ],
)
def test_what_is_taken_to_change(overrides: list[str], share: float, source: str) -> None:
    spec, config = shipped(*overrides)

    taken = changed_share(spec, config)

    assert taken.value == pytest.approx(share)
    assert source in taken.source
