"""A run to look at."""

from __future__ import annotations

import pytest

from tests.runspec.local.fake_run import drive_roles, prepared, small_spec, usual_roles
from tests.runspec.local.test_supervise import Watch


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a finished run `small` of five steps."""
    runs_dir = tmp_path_factory.mktemp("runs")
    with prepared(small_spec(), runs_dir) as run:
        drive_roles(run, usual_roles(run), Watch())
    return runs_dir
