"""What a page of the run elsewhere reads: rows of the ledger, metrics, rollouts, the tokenizer."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.run_files import METRICS_FILE, initial_model, submission_files
from runspec.core.spec.schema import RunSpec
from verify.coordinator.intake import Refusal, refusing
from verify.coordinator.ledger.snapshot import open_snapshot
from verify.formats.joining import MAX_PIECE_BYTES, TOKENIZER_FILE


class View:
    """Reads a run's files for its operator; it changes nothing.

    Args:
        run_dir: of the run.
        spec: its resolved spec.
    """

    def __init__(self, run_dir: Path, spec: RunSpec) -> None:
        self._run_dir, self._spec = run_dir, spec

    def ledger(self, after: int) -> bytes:
        """Return rows later than the `after`-th as JSON lines [seq, kind, body]: some, or none if
        there is no later one.

        Raises:
            Refusal: the ledger cannot be read now.
        """
        lines: list[bytes] = []
        left = MAX_PIECE_BYTES
        with refusing(503, UserError), closing(open_snapshot(self._run_dir, self._spec)) as ledger:
            for row in ledger.rows(after=after):
                line = json.dumps([row.seq, row.kind.decode(), row.body.decode()]).encode() + b"\n"
                left -= len(line)
                if left < 0 and lines:
                    break
                lines.append(line)
        return b"".join(lines)

    def metrics(self, offset: int) -> bytes:
        """Return a piece of metrics.jsonl.

        Raises:
            Refusal: 409, the file is shorter: read it from its start.
        """
        path = self._run_dir / METRICS_FILE
        try:
            with path.open("rb") as file:
                if file.seek(0, 2) < offset:
                    raise Refusal(409, "the file has become shorter")
                file.seek(offset)
                return file.read(MAX_PIECE_BYTES)
        except FileNotFoundError:
            return b""

    def tokenizer(self) -> Path:
        """Return the file of the run's tokenizer."""
        return initial_model(self._run_dir) / TOKENIZER_FILE

    def table(self, kind: str, step: int, submission: str) -> Path:
        """Return the file of a submission, or of the verdict on it; it may be gone."""
        files = submission_files(self._run_dir, step, submission)
        return files.verdict if kind == "verdict" else files.submission
