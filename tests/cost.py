"""Hooks of pytest's: how tests are divided among processes, and the CPU seconds they take.

`--dist loadfile` keeps the tests of a file in one process, and those of a group here. (xdist's own
`loadgroup` needs an attribute of tests that pytest 9.2 no longer has.)

CPU seconds are those of a test process and of the child processes that it has waited for, from one
report to the next; children that outlive a test count for a later one.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

GROUPS = {
    "tests/e2e/": "runs",
    "tests/sampler/engine/": "engines",
    "tests/sampler/worker/": "engines",
    "tests/runspec/cli/test_serving.py": "engines",
}
"""Tests that one process has all of: whole runs, and those that share a vLLM engine."""
ORDER = ("tests/e2e/", "tests/sampler/engine/", "tests/learner_jax/", "tests/attacks/", "tests/")
SLOWEST = 40
"""Number of files whose CPU seconds are printed."""
_reported = pytest.StashKey[float]()
_collecting: list[float] = []


def cpu_seconds() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    return sum(os.times()[:4])


class Groups(LoadFileScheduling):
    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::", 1)[0]
        return next((name for path, name in GROUPS.items() if file.startswith(path)), file)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups | None:
    return Groups(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put long tests first, so that no process is alone at the end."""

    def place(item: pytest.Item) -> int:
        return next((i for i, path in enumerate(ORDER) if item.nodeid.startswith(path)), len(ORDER))

    items.sort(key=place)


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[_reported] = cpu_seconds()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["collecting"] = cpu_seconds()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Note on each report (setup, call, teardown) the CPU seconds since the one before."""
    report = yield
    now = cpu_seconds()
    report.cpu_s = now - item.config.stash[_reported]
    item.config.stash[_reported] = now
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _collecting.append(getattr(node, "workeroutput", {}).get("collecting", 0.0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    folders: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and hasattr(report, "cpu_s"):
                file = report.nodeid.split("::", 1)[0]
                files[file] += report.cpu_s
                folders["/".join(file.split("/")[:2])] += report.cpu_s
    terminalreporter.section("CPU seconds of tests and children")
    for file, seconds in files.most_common(SLOWEST):
        if seconds >= 1:
            terminalreporter.line(f"{seconds:7.1f}  {file}")
    for folder, seconds in folders.most_common():
        terminalreporter.line(f"{seconds:7.1f}  {folder}")
    terminalreporter.line(f"{sum(_collecting):7.1f}  imports and collecting, in all processes")
    total = sum(folders.values())
    terminalreporter.line(f"{total:7.1f}  all tests; {cpu_seconds():.1f} with the rest")
