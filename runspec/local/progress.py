"""How far a run is, read off its files: trained steps, the last batch, the last version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runspec.local.children import last_lines
from runspec.local.fleet import Event, Progress, Published, Sampled, Trained
from runspec.local.metrics import FILE_NAME, JsonLines, Row, latest_by_step
from runspec.spec.schema import RunSpec
from verify.formats.batch import FILE_NAME as BATCH_FILE
from verify.formats.layout import step_folder


class RunProgress:
    """Watches a run directory; `poll` is cheap enough for many times a second."""

    def __init__(self, run_dir: Path, spec: RunSpec) -> None:
        self._lines = JsonLines(run_dir / FILE_NAME)
        self._rows: list[dict[str, Any]] = []
        self._steps = spec.steps
        self._last_batch = step_folder(run_dir, spec.steps - 1) / BATCH_FILE
        versions = run_dir / "store" / "origin" / spec.name / "versions"
        self._last_version = versions / str(spec.steps) / "manifest.json"

    @property
    def rows(self) -> Sequence[Row]:
        return self._rows

    @property
    def note(self) -> str:
        return ""

    def poll(self) -> list[Event]:
        events: list[Event] = []
        new = self._lines.new_rows()
        if new:
            self._rows = latest_by_step([*self._rows, *new])
            events.append(Progress())
        if self._rows and self._rows[-1]["step"] >= self._steps - 1:
            events.append(Trained())
        if self._last_batch.exists():
            events.append(Sampled())
        if self._last_version.exists():
            events.append(Published())
        return events


class StageProgress:
    """A stage before the run, done once the file that it makes is there."""

    rows: Sequence[Row] = ()

    def __init__(self, product: Path, log: Path) -> None:
        self._product = product
        self._log = log

    @property
    def note(self) -> str:
        """The last line that the stage has logged."""
        return "".join(last_lines(self._log, 1))

    def poll(self) -> list[Event]:
        return [Sampled(), Trained(), Published()] if self._product.exists() else []
