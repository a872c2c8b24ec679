"""Findings of an audit: plain data, and their text and JSON forms."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

_LONGEST = 200
"""Characters of a found or expected value; a ledger may hold anything."""


@dataclass(frozen=True)
class Finding:
    row: int | None
    """Row of the ledger; None if the finding is about no row."""
    what: str
    """The check, in a word or two (docs/audit.md lists them)."""
    found: str
    expected: str

    def __str__(self) -> str:
        where = "no row" if self.row is None else f"row {self.row}"
        return f"{where}: {self.what}: {self.found}; expected {self.expected}"


@dataclass(frozen=True)
class Credit:
    """Credit of a worker by the ledger."""

    rollouts: int = 0
    tokens: int = 0


@dataclass
class Report:
    """The outcome of an audit; filled while it runs."""

    rows: int = 0
    head: str = ""
    """Chain of the last row."""
    anchored_rows: int = 0
    """Rows that the newest manifest's signature covers."""
    steps_closed: int = 0
    files_read: int = 0
    """Files of submissions and verdicts, envelopes included."""
    files_gone: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    credits: dict[str, Credit] = field(default_factory=dict)

    def add(self, row: int | None, what: str, found: object, expected: object) -> None:
        self.findings.append(Finding(row, what, _short(found), _short(expected)))

    def require(
        self, holds: bool, row: int | None, what: str, found: object, expected: object
    ) -> bool:
        """Add a finding unless `holds`; return `holds`."""
        if not holds:
            self.add(row, what, found, expected)
        return holds

    def lines(self) -> Iterator[str]:
        """Return the report as text; characters that cannot be printed are replaced."""
        return ("".join(c if c.isprintable() else "?" for c in line) for line in self._lines())

    def _lines(self) -> Iterator[str]:
        yield (
            f"{self.rows} rows, {self.steps_closed} steps closed, "
            f"{self.anchored_rows} rows under a signed manifest; head {self.rows}:{self.head}"
        )
        yield f"{self.files_read} files read, {self.files_gone} gone"
        yield from (f"note: {note}" for note in self.notes)
        for worker, credit in sorted(self.credits.items()):
            yield f"worker {worker}: {credit.rollouts} rollouts, {credit.tokens} tokens"
        yield from (f"FINDING {finding}" for finding in self.findings)
        count = len(self.findings)
        yield "clean" if not count else f"{count} finding{'s' * (count > 1)}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
