"""A pytest plugin: coverage knows which file of tests runs, in this process and in its children."""

from __future__ import annotations

import os

import coverage
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    file = item.nodeid.split("::", 1)[0]
    if os.environ.get("COVERAGE_CONTEXT") != file:
        os.environ["COVERAGE_CONTEXT"] = file  # children read it when they start
        if (running := coverage.Coverage.current()) is not None:
            running.switch_context(file)
