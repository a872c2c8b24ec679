"""Several processes of tests (xdist's): how many, what each is given and in which order; where time
went."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

RUNS = (
    "tests/e2e/",
    "tests/attacks/test_dishonest_workers.py",
    "tests/runspec/backends/test_kubernetes_run.py",
)
"""Start whole runs, whose learner and samplers have cores of their own: never two at a time."""
ENGINES = (
    "tests/runspec/cli/test_serving.py",
    "tests/sampler/engine/",
    "tests/sampler/measuring/test_command.py",
    "tests/sampler/worker/test_in_flight.py",
    "tests/sampler/worker/test_worker.py",
)
"""Share engines and a process that has vLLM imported."""
RUN_S = 1800
"""How long a test among them may take: some wait for several parts of a run, each with patience."""
COSTS = Path(__file__).with_name("costs.txt")
"""Seconds, and a file that takes them, as tests in several processes print at their end. Only their
order counts; a file that is not there takes few."""
LISTED = 60
"""Files whose seconds are printed."""
PROCESS_BYTES = 6e9
"""What a test process may grow to, with the engines that it keeps."""


def file_of(nodeid: str) -> str:
    return nodeid.split("::", 1)[0]


def costs() -> dict[str, float]:
    """Seconds by file."""
    lines = (line.split(maxsplit=1) for line in COSTS.read_text().splitlines())
    return {path: float(seconds) for seconds, path in lines}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int | None:
    """One more than there are cores, for tests also wait, where there is memory for it."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None  # what xdist makes of it
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)) + 1, int(memory / PROCESS_BYTES)))


class FilesAndRuns(LoadFileScheduling):
    """A file's tests go to one process, those of all files that start runs to one, and those of all
    that share engines."""

    def _split_scope(self, nodeid: str) -> str:
        file = file_of(nodeid)
        if file.startswith(RUNS):
            return "runs"
        return "engines" if file.startswith(ENGINES) else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesAndRuns | None:
    return FilesAndRuns(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest goes first, so that no process is alone at the end: runs, then files by
    their cost (`make` tells xdist to keep the order). One process keeps pytest's order."""
    for item in items:
        if item.nodeid.startswith(RUNS):
            item.add_marker(pytest.mark.timeout(RUN_S))
    if hasattr(config, "workerinput"):
        known = costs()

        def place(item: pytest.Item) -> tuple[bool, float]:
            return not item.nodeid.startswith(RUNS), -known.get(file_of(item.nodeid), 0.0)

        items.sort(key=place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Where time went: what `costs.txt` holds."""
    if terminalreporter.config.getoption("dist", "no") == "no":
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[file_of(report.nodeid)] += report.duration
    terminalreporter.section("seconds by file")
    for file, taken in seconds.most_common(LISTED):
        terminalreporter.line(f"{taken:.0f} {file}")
