"""What a run leaves to look at: summary.json and report.html."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from runspec.core.files import write_atomic
from runspec.local.metrics import JsonLines, read_rows, summarise, weights_bytes_sent

SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
SAMPLES_FILE = "samples.jsonl"


def conclude(run_dir: Path, wall_s: float) -> dict[str, Any] | None:
    """Writes summary.json and report.html of what was trained so far.

    Args:
        run_dir: the run directory.
        wall_s: seconds that the run was up, over all its sessions.

    Returns:
        The summary; None, and nothing written, while no step has been trained.
    """
    rows = read_rows(run_dir)
    if not rows:
        return None
    # Imported here: it draws with matplotlib.
    from runspec.local.report import render_report

    summary = summarise(rows, wall_s=wall_s, weights_bytes_sent=weights_bytes_sent(run_dir))
    write_atomic(run_dir / SUMMARY_FILE, json.dumps(summary, indent=2).encode() + b"\n")
    samples = JsonLines(run_dir / SAMPLES_FILE).new_rows()
    page = render_report(run_dir.name, rows, samples, summary)
    write_atomic(run_dir / REPORT_FILE, page.encode())
    return summary
