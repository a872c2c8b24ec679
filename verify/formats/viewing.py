"""Limits and names of what the coordinator tells a page of the run (docs/coordinator.md)."""

from __future__ import annotations

MAX_PIECE_BYTES = 4 * 1024 * 1024
"""About the largest piece of the ledger or of metrics.jsonl in one answer."""
MAX_ROW_BYTES = 64 * 1024 * 1024
"""Largest row of the ledger, which is in a piece of its own."""
TOKENIZER_FILE = "tokenizer.json"
