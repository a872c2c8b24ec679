"""What the validator loads by name: what lacks is said, and how to get it."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from runspec.core.process import RunStopped
from tests.verify.small_model import small_spec
from verify import plugins
from verify.plugins import WeightsLocation, load_prefill_engine


def test_an_engine_whose_libraries_are_not_here_is_no_fault_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every engine of ours is offered wherever `runspec` is, whichever extras came with it."""
    # given an installation without what the spec's engine computes with
    spec = small_spec()
    (tmp_path / "an_engine.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    offered = EntryPoint(spec.verify.engine, "an_engine:Engine", "runspec.prefill")
    monkeypatch.setattr(plugins, "entry_points", lambda group: [offered])
    # when a validator loads it, then the message names what lacks, whose it is, and what to do
    with pytest.raises(RunStopped, match="no_such_library") as caught:
        load_prefill_engine(spec, WeightsLocation("run", ["http://x"], "0" * 64, tmp_path))
    assert spec.verify.engine in caught.value.place and "[learner]" in caught.value.remedy
