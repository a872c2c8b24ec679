"""`make accelerator` without an accelerator: every part in small, and what goes wrong is named. The
source that supervised training is measured against costs the bits that it should."""

import itertools
import os
import re
import subprocess
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.accelerator import __main__ as accelerator
from benchmarks.accelerator.__main__ import PARTS, Part, main
from benchmarks.references import markov
from benchmarks.references.ngram import NGram
from learner_jax.corpus.sources import GeneratedReads
from tests.waiting import eventually

pytestmark = pytest.mark.slow

BROKEN = "tests.benchmarks.broken_parts"


def rows_of(printed: str) -> dict[str, list[list[str]]]:
    """The table's cells by part, without its head."""
    cells = [line.strip("| ").split(" | ") for line in printed.splitlines() if line[:2] == "| "]
    found: dict[str, list[list[str]]] = {}
    for row in cells[1:]:
        found.setdefault(row[0], []).append(row[1:])
    return found


@pytest.mark.nightly
def test_every_part_runs_in_small_and_claims_no_speed(capsys):
    assert main(total_s=3600.0) == 0
    printed = capsys.readouterr().out
    rows = rows_of(printed)
    assert list(rows) == [part.name for part in PARTS]
    for part in PARTS:
        verdicts = {row[3] for row in rows[part.name]}
        assert verdicts <= ({"not run"} if part.big_only else {"ok", "measured"}), rows[part.name]
    assert "CPU, in small: no figures of an accelerator" in printed
    figures = [row[1] for part in PARTS for row in rows[part.name]]
    assert not re.search(r"tokens/s|TFLOP|MFU|\b[um]?s\b", " ".join(figures))


def test_a_wrong_kernel_fails_the_run_and_what_needs_it_is_not_timed(capsys):
    wrong = Part("attention", BROKEN, 1.0, (), variant="wrong")
    after = Part("learner", "benchmarks.accelerator.mfu", 1.0, (), after=("attention",))
    assert main([wrong, after], 3600.0) == 1
    rows = rows_of(capsys.readouterr().out)
    assert [row[3] for row in rows["attention"]] == ["WRONG", "ok"]
    assert rows["attention"][0][0].startswith("xla") and rows["learner"][0][3] == "not run"
    assert "attention" in rows["learner"][0][1]


class CutOff(subprocess.Popen):
    """A process whose deadline passes once it has printed a row, and not before."""

    def __init__(self, *arguments: Any, stdout: Any = None, **options: Any) -> None:
        self._printed = stdout
        super().__init__(*arguments, stdout=stdout, **options)

    def wait(self, timeout: float | None = None) -> int:
        def row() -> bool:
            return not isinstance(self._printed, int) and bool(
                os.fstat(self._printed.fileno()).st_size
            )

        eventually(lambda: self.poll() is not None or (timeout is not None and row()), "a row")
        if self.poll() is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return int(self.returncode)


def test_a_hanging_part_a_crash_a_missing_package_and_no_time_cost_a_row_each(monkeypatch, capsys):
    # given a clock that stands
    clock = SimpleNamespace(monotonic=lambda: 0.0, time=time.time)
    monkeypatch.setattr(accelerator, "time", clock)
    monkeypatch.setattr(subprocess, "Popen", CutOff)
    hangs = Part("hangs", BROKEN, 1.0, (), variant="hangs")
    crashes = Part("crashes", "tests.benchmarks.no_such_module", 3.0, ())
    lacks = Part("lacks", BROKEN, 1.0, ("no_such_package",))
    # when parts go wrong, then each has its rows, and those after it theirs
    assert main([hangs, crashes, lacks], 1600.0) == 1
    rows = rows_of(capsys.readouterr().out)
    assert rows["hangs"][0][0] == "before it hangs"
    assert rows["hangs"][1][1].startswith("cut off after 400 s")
    assert rows["crashes"][0][3] == "FAILED" and "no_such_module" in rows["crashes"][0][1]
    assert rows["lacks"][0][1:4] == ["no package no_such_package", "", "not run"]
    # and without time a part is left out
    assert main([hangs], 5.0) == 0
    assert "5 s of 5 were left" in rows_of(capsys.readouterr().out)["hangs"][0][1]


def test_a_library_that_does_not_see_the_gpu_fails(tmp_path, monkeypatch, capsys):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB, 580.1'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main([Part("attention", "benchmarks.accelerator.attention", 1.0, ())], 3600.0) == 1
    printed = capsys.readouterr().out
    assert "device: NVIDIA H100, 81559 MiB, driver 580.1;" in printed
    [row] = rows_of(printed)["attention"]
    assert row[3] == "FAILED" and "it sees no accelerator here" in row[1]


def test_generated_reads_cost_the_bits_of_their_table_and_an_ngram_comes_near():
    source = GeneratedReads(organisms=1, reads=1000, length=1000)
    table, reads = source.tables()[0], [document.text for document in source.documents()]
    # then triples in a million bases are as frequent as said, and a base costs H(3) bits
    triples = Counter(read[i : i + 3] for read in reads for i in range(len(read) - 2))
    found = np.array([triples["".join(t)] for t in itertools.product("ACGT", repeat=3)])
    assert np.abs(found / found.sum() - markov.stationary(table)).max() < 3e-3
    assert markov.bits(table, reads) / 1e6 == pytest.approx(markov.entropy(table, 3), rel=1e-2)
    # and fitted to 900,000 bases of an order that it spans, an n-gram needs hardly more
    texts = [read.encode() for read in reads]
    needed = NGram.fitted(texts[:900]).bits_per_byte(texts[900:])
    own = markov.bits(table, reads[900:]) / 1e5
    assert own < needed < 1.02 * own
