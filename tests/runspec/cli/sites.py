"""Sites that `runspec prepare` makes of the laptop profile."""

from __future__ import annotations

import socket
from pathlib import Path
from subprocess import CompletedProcess

from tests.harness import TARGET_SHORT
from tests.runspec.cli.in_process import runspec


def prepare(site: Path, *overrides: str) -> CompletedProcess[str]:
    """What `runspec prepare` says of a run `small`."""
    sets = [word for text in ("name=small", *overrides) for word in ("--set", text)]
    return runspec("prepare", TARGET_SHORT, "--profile", "laptop", *sets, "-o", site)


def bundle(site: Path, name: str) -> Path:
    return site / "bundles" / f"{name}.json"


def free_port() -> int:
    """A port where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
