"""Journal of a monitor: which thing has which number in the tool's record.

A line is written before the thing is sent, so that after a crash the same thing has the same
number, and a tool that counts what it has gets the rest, each once:

    {"record": "target-short-20261126-181200-3fa9"}
    {"key": "step:0", "digest": "..."}
    {"key": "evaluation:held-out:0", "digest": "..."}
    {"sent": 2}
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runspec.core.files import write_atomic
from runspec.local.metrics import JsonLines
from runspec.local.monitors.feed import Item

FILE_NAME = "journal.jsonl"


class Journal:
    """Keys and digests of a record's entries, in the order of their numbers.

    Args:
        folder: the monitor's own.
        run: name of the run.
    """

    def __init__(self, folder: Path, run: str) -> None:
        self._path, self._run = folder / FILE_NAME, run
        rows = JsonLines(self._path).new_rows()
        self.record = next((str(row["record"]) for row in rows if "record" in row), "")
        """Name of the record; empty before `begin`."""
        self.entries = [(str(row["key"]), str(row["digest"])) for row in rows if "key" in row]
        self.sent = max((int(row["sent"]) for row in rows if "sent" in row), default=0)
        """How many were flushed."""
        self.keys = {key for key, _ in self.entries}
        if self.record:
            self._rewrite()  # without the torn line that a crash can leave

    def agrees(self, items: Mapping[str, Item]) -> bool:
        """Return whether all entries are things that the run still has, unchanged: a rollback, and
        the steps trained after it, change them."""
        there = (items.get(key) for key, _ in self.entries)
        return bool(self.record) and all(
            item is not None and item.digest == digest
            for item, (_, digest) in zip(there, self.entries, strict=True)
        )

    def begin(self) -> None:
        """Begin another record, without entries."""
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        self.record, self.sent = f"{self._run}-{stamp}-{secrets.token_hex(2)}", 0
        self.entries, self.keys = [], set()
        self._rewrite()

    def add(self, items: Sequence[Item]) -> None:
        """Number things that have no number yet."""
        self.entries += [(item.key, item.digest) for item in items]
        self.keys.update(item.key for item in items)
        self._append([{"key": item.key, "digest": item.digest} for item in items])

    def flushed(self, count: int) -> None:
        """Note that the tool has all entries below a number."""
        self.sent = count
        self._append([{"sent": count}])

    def _rewrite(self) -> None:
        rows: list[dict[str, Any]] = [{"record": self.record}]
        rows += [{"key": key, "digest": digest} for key, digest in self.entries]
        write_atomic(self._path, _lines([*rows, {"sent": self.sent}]))

    def _append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        with self._path.open("ab") as file:
            file.write(_lines(rows))
            file.flush()
            os.fsync(file.fileno())


def _lines(rows: Sequence[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()
