"""How far a run is, by its files and by its coordinator."""

from __future__ import annotations

from pathlib import Path

from runspec.core.files import write_atomic
from runspec.local.fleet import Reached
from runspec.local.progress import RunProgress, StageProgress
from tests.runspec.local.fake_run import small_spec

NOBODY = "http://127.0.0.1:9"


def test_files_become_events_as_they_appear(tmp_path: Path) -> None:
    progress = RunProgress(tmp_path, small_spec("small", 2), NOBODY)
    metrics = tmp_path / "metrics.jsonl"
    assert progress.poll() == Reached()

    metrics.write_text('{"step": 0}\n')
    assert progress.poll() == Reached(stepped=True)
    assert progress.poll() == Reached()

    write_atomic(tmp_path / "rollouts" / "step_1" / "batch.json", b"{}")
    assert progress.poll() == Reached(sampled=True)

    metrics.write_text('{"step": 0}\n{"step": 1}\n')
    assert progress.poll() == Reached(stepped=True, trained=True, sampled=True)
    assert [row["step"] for row in progress.rows] == [0, 1]

    write_atomic(tmp_path / "store/origin/small/versions/2/manifest.json", b"{}")
    assert progress.poll() == Reached(trained=True, sampled=True, published=True)


def test_a_stage_is_done_once_its_product_is_there(tmp_path: Path) -> None:
    log = tmp_path / "stage.log"
    progress = StageProgress(tmp_path / "product", log)
    assert (progress.poll(), progress.note) == (Reached(), "")
    log.write_text("update 10\n2026-01-01 10:00:00,000 I update 20\n")
    (tmp_path / "product").touch()
    assert progress.poll().trained
    assert progress.note == "update 20"
