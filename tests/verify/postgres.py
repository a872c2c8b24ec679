"""A PostgreSQL server of the tests' own, where one is installed."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_DEADLINE_S = 1200.0


class Server:
    """At work; `url` names its database.

    Args:
        folder: with its data, its log and its socket.
        control: `pg_ctl` and whose data it is to control.
    """

    def __init__(self, folder: str, control: list[str]) -> None:
        self.url = f"postgresql://postgres@/postgres?host={folder}"
        self._folder, self._control = folder, control

    def start(self) -> None:
        options = f"-k {self._folder} -h ''"
        _run([*self._control, "-l", f"{self._folder}/log", "-o", options, "start"], self._folder)

    def kill(self) -> None:
        """Ends it as a loss of power would: no transaction that is open is finished."""
        _run([*self._control, "-m", "immediate", "stop"], self._folder)


@contextmanager
def postgres_server() -> Iterator[Server]:
    """Serves an empty database on a socket in a folder that goes with it.

    Skips the test where there is no server or no driver.
    """
    pytest.importorskip("psycopg", reason="no driver: the extra postgres")
    tools = Path(shutil.which("pg_ctl") or "/").resolve().parent
    if not (tools / "initdb").exists():
        pytest.skip("no PostgreSQL server is installed")
    with tempfile.TemporaryDirectory(prefix="pg") as folder:
        data = Path(folder) / "data"
        user = _own(Path(folder))
        run = [*user, str(tools / "initdb"), "-D", str(data), "-A", "trust", "-U", "postgres", "-N"]
        _run(run, folder)
        control = [*user, str(tools / "pg_ctl"), "-D", str(data), "-w"]
        server = Server(folder, control)
        server.start()
        try:
            yield server
        finally:
            server.kill()


def _own(folder: Path) -> list[str]:
    """The server refuses to be root: then another owns the folder, and its commands run as that."""
    if os.geteuid() != 0:
        return []
    try:
        other = pwd.getpwnam("postgres")
    except KeyError:
        pytest.skip("PostgreSQL does not run as root, and there is no user postgres")
    os.chown(folder, other.pw_uid, other.pw_gid)
    return ["setpriv", f"--reuid={other.pw_uid}", f"--regid={other.pw_gid}", "--clear-groups"]


def _run(command: list[str], folder: str) -> None:
    done = subprocess.run(
        command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, timeout=_DEADLINE_S
    )
    assert done.returncode == 0, done.stderr.decode()
