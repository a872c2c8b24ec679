"""`python -m sampler solve-rates` with a random model and vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sampler.__main__ import main
from sampler.measuring.command import only_source, unfiltered
from sampler.tasks.interfaces import make_source
from sampler.tasks.traces import build_warm_start_data
from tests.preloaded import SAMPLER, Program
from tests.sampler.engine.models import save_version
from tests.sampler.tasks.conftest import SPECS, laptop_spec
from tests.sampler.tasks.row_files import KeepAll, make_rows, write_jsonl
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("preload_server")
DEADLINE_S = 240.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Any Hugging Face directory: random weights, a tokenizer, no probe."""
    directory = save_version(tmp_path_factory.mktemp("model") / "random")
    build_warm_start_data(laptop_spec()).write_tokenizer(directory)
    (directory / "probe.json").unlink()
    return directory


def arguments(model: Path, out: Path, *more: str) -> list[str]:
    return [
        *("solve-rates", str(SPECS / "target_short.yaml"), "--profile", "laptop"),
        *("--source", "spell_backward", "--model", str(model), "--out", str(out)),
        *("--samples", "2", *more),
    ]


def start(log: Path, *arguments: str) -> Program:
    return Program(SAMPLER, *arguments, log=log)


@pytest.mark.slow
def test_a_measurement_killed_anywhere_goes_on_where_it_was(model: Path, tmp_path: Path) -> None:
    # Given a measurement that is killed once some problems are done
    out, progress = tmp_path / "rates.parquet", tmp_path / "rates.parquet.progress"
    log = tmp_path / "log"
    first = start(log, *arguments(model, out, "--limit", "3000"))
    try:
        eventually(
            lambda: progress.exists() and progress.read_bytes().count(b"\n") > 3,
            "three problems are measured",
            deadline_s=DEADLINE_S,
            hopeless=lambda: "" if first.poll() is None else "the command ended",
            context=log.read_text,
        )
    finally:
        first.kill()
        first.wait()
    kept = progress.read_bytes()
    kept = kept[: kept.rfind(b"\n")].splitlines()
    assert 3 < len(kept) < 3001
    assert not out.exists()

    # When the same is asked for again, of fewer problems but more than are measured
    limit = len(kept) + 19
    again = start(log, *arguments(model, out, "--limit", str(limit)))
    assert again.wait(DEADLINE_S) == 0, log.read_text()

    # Then it goes on behind those, there is a row for each, and no progress is left
    assert f"continuing after {len(kept) - 1} problems" in log.read_text()
    assert f"{limit} of {limit} problems" in log.read_text()
    table = pq.read_table(out)
    assert table.column_names == [
        *("problem_id", "task_type", "prompt", "verification_info", "solve_rate")
    ]
    assert table["problem_id"].to_pylist() == [f"spell_backward-{i}" for i in range(limit)]
    assert all(rate in (0.0, 0.5, 1.0) for rate in table["solve_rate"].to_pylist())
    assert json.loads(table["verification_info"].to_pylist()[0])["dataset"] == "spell_backward"
    assert not progress.exists()

    # And the file is not written over
    assert start(log, *arguments(model, out, "--limit", "6")).wait(DEADLINE_S) == 1
    assert "the file exists" in log.read_text()


def test_what_cannot_be_measured_says_why(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("sampler.measuring.command.stop_event", lambda: None)
            assert main([*arguments(model, tmp_path / "out.parquet"), *words]) == 1
        return capsys.readouterr().err

    assert "no source 'rows'; there are spell_backward" in said("--source", "rows")
    assert "--samples and --limit must be at least 1" in said("--samples", "0")
    assert "no sampler pool 'gpu'" in said("--pool", "gpu")
    assert "cannot read the tokenizer" in said("--model", str(tmp_path))


def test_rows_are_measured_whatever_rate_they_have(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", make_rows(9))
    solve_rate = "solve_rate: {field: rate, min: 0.1, max: 0.9}"
    spec = laptop_spec(f"data.sources.rows={{kind: jsonl, uri: {path.name}, {solve_rate}}}")

    chosen = only_source(spec, "rows", tmp_path)
    [source] = unfiltered(chosen).data.sources

    assert (source.name, source.uri, source.solve_rate) == ("rows", str(path), None)
    assert len(make_source(source, 1, KeepAll())) == 9
