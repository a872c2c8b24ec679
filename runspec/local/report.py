"""Writes summary.json and report.html, the page of `runspec dashboard` with its data in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from runspec.core.errors import describe_error
from runspec.core.files import write_atomic
from runspec.local.evaluations import results_of, summarise_evaluations
from runspec.local.metrics import bytes_sent, read_rows, summarise

SUMMARY_FILE = "summary.json"
REPORT_FILE = "report.html"
MAX_REPORT_BYTES = 4_000_000
MAX_READ_S = 5.0
"""Seconds for which rollouts are read; the newest come first."""


def write_summary(
    run_dir: Path, wall_s: float, warn: Callable[[str], None]
) -> dict[str, Any] | None:
    """Write summary.json and report.html of the steps trained so far.

    Args:
        run_dir: the run directory.
        wall_s: seconds that the run was up, over all its sessions.
        warn: called with a line if the page cannot be made. It shows what strangers sent, which
            must not decide how a run ends.

    Returns:
        The summary; None, and nothing written, while no step has been trained.
    """
    rows = read_rows(run_dir)
    if not rows:
        return None
    summary = summarise(rows, wall_s=wall_s, **bytes_sent(run_dir))
    summary["evaluations"] = summarise_evaluations(results_of(run_dir, rows))
    write_atomic(run_dir / SUMMARY_FILE, json.dumps(summary, indent=2).encode() + b"\n")
    # Drawn in here: numpy and tokenizers, which a run's other processes do not wait for.
    from runspec.local.dashboard.page import exported_page
    from runspec.local.dashboard.source import FolderSource
    from runspec.local.dashboard.view import PageData

    try:
        view = PageData(FolderSource(run_dir))
        view.refresh(read_s=MAX_READ_S)
        page = exported_page([view], MAX_REPORT_BYTES).encode()
    except Exception as error:  # noqa: BLE001 - whatever a stranger's files lead to
        warn(f"{REPORT_FILE} is not written: {describe_error(error, 'runspec')}")
    else:
        write_atomic(run_dir / REPORT_FILE, page)
    return summary
