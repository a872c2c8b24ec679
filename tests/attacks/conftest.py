"""Fixtures of the attacks on the sandbox."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attacks.sandboxed import SETS, Sandbox, make_sandbox


@pytest.fixture(params=list(SETS))
def sandbox(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Sandbox:
    """A sandbox for each set of mechanisms that this machine has."""
    directory = tmp_path / "scratches"
    directory.mkdir()
    tmp_path.chmod(0o755)
    return make_sandbox(request.param, directory, monkeypatch)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user that has nothing to do with it."""
    with subprocess.Popen(["sleep", "300"], start_new_session=True) as process:
        yield process
        process.kill()
