"""The benchmark of a machine that is rented by the minute runs from end to end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.slow  # six processes that compile
def test_every_section_measures_on_a_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_attention", "--tiny"],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    report = json.loads(done.stdout)
    # then no section has failed, and XLA's way is right on every layout of segments
    sections = [report[name] for name in ("versions", "numerics", "speed", "layers", "head")]
    assert all(sections)
    assert not [entry for section in sections for entry in section if "error" in entry]
    assert {entry["segments"] for entry in report["numerics"]} == {
        "uneven, a hole, padding",
        "length % 128 = 64",
        "one-token segments",
        "one segment",
    }
    for entry in report["numerics"]:
        assert max(entry["errors"].values()) < 2e-2, entry
    # and every program was timed
    assert all(entry["ms"] > 0 for entry in report["speed"] + report["layers"] + report["head"])
