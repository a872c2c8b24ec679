"""The hash chain, row by row, with whatever a damaged row holds."""

from __future__ import annotations

from runspec.core.hashing import hash_parts, is_digest
from verify.audit.findings import Report
from verify.audit.ledger_rows import Row
from verify.ledger import FIRST_CHAIN


class ChainAudit:
    """Follows the chain; after a break it goes on from the broken row, so each break is named.

    Args:
        report: gets the findings.
        heads: chains noted down before by row; each must still be that row's.
    """

    def __init__(self, report: Report, heads: dict[int, str]) -> None:
        self._report, self._heads = report, heads
        self.head, self.last = FIRST_CHAIN, 0

    def check(self, row: Row) -> None:
        """Checks a row; afterwards `head` is its chain, `last` its number."""
        require = self._report.require
        if row.seq != self.last + 1:
            between = f"rows {self.last + 1} to {row.seq - 1}"
            self._report.add(row.seq, "rows", f"row {row.seq} after {self.last}", between)
        # A row number below zero, which only a tampered file has, is part of no chain.
        expected = hash_parts(bytes.fromhex(self.head), max(row.seq, 0), row.kind, row.body).hex()
        chain = row.chain.decode("ascii", "replace")
        require(chain == expected, row.seq, "chain", chain, expected)
        self.head, self.last = chain if is_digest(chain) else expected, row.seq
        if row.seq in self._heads:
            noted = self._heads.pop(row.seq)
            require(chain == noted, row.seq, "noted head", chain, noted)

    def end(self) -> None:
        """All rows are read: nothing that was noted down may lie beyond."""
        for rows in sorted(self._heads):
            self._report.add(
                None, "noted head", f"{self.last} rows", f"{rows} rows, as were seen before"
            )
