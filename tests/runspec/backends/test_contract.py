"""What the supervisor asks of the processes of every backend that this machine can run.

Those of Ray need a cluster: `tests/e2e/test_ray.py` has a whole run on one.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from runspec.backends.kubernetes import KubernetesBackend
from runspec.core.errors import UserError
from runspec.local.backend import STARTING, Backend, LocalProcesses, Processes, backend
from runspec.local.processes import RoleSpec
from tests.examples.installed import installed_paths
from tests.harness import free_port
from tests.runspec.local.fake_run import prepared, small_spec
from tests.waiting import eventually

pytestmark = pytest.mark.slow

SERVES = (
    "import os, socket, sys, time\n"
    "print('serving', os.environ['ROLE'], flush=True)\n"
    "server = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
    "time.sleep(3600)\n"
)


def ssh_example(folder: Path, patch: pytest.MonkeyPatch) -> Backend:
    for path in installed_paths("ssh_backend", folder):
        patch.syspath_prepend(path)
    backend.cache_clear()
    return backend("ssh")


@pytest.fixture(params=["local", "kubernetes", "ssh"])
def processes(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Processes, Path]]:
    """The processes of a run by each backend, and the folder of its logs."""
    with prepared(small_spec(), tmp_path / "runs") as run:
        logs = run.directory / "logs"
        logs.mkdir(exist_ok=True)  # the supervisor has made it
        if request.param == "local":
            made: Processes = LocalProcesses(logs)
        elif request.param == "kubernetes":
            made, _ = KubernetesBackend().processes(run)
        else:
            made, _ = ssh_example(tmp_path / "site", monkeypatch).processes(run)
        yield made, logs
        made.close(10.0)
    backend.cache_clear()


@pytest.fixture
def role() -> RoleSpec:
    """A role that logs a line and serves on a port."""
    port = free_port()
    command = (sys.executable, "-c", SERVES, str(port))
    return RoleSpec("server", command, {"ROLE": "mine"}, listen=("127.0.0.1", port))


def test_a_role_is_started_watched_stopped_and_started_again(processes, role):
    made, logs = processes
    for code in (-signal.SIGTERM, -signal.SIGKILL):
        # given a role that was started, then it runs, and is ready once its port answers
        made.start(role)
        assert made.look("server").exit_code is None
        eventually(lambda: made.look("server").ready, "its port answers")
        # when it is stopped, then its exit code is the signal's, for as long as it is asked
        made.stop("server", signal.Signals(-code))
        eventually(lambda: made.look("server").exit_code is not None, "its end")
        assert [made.look("server").exit_code, made.look("server").ready] == [code, False]
        made.stop("server", signal.SIGTERM)  # which has ended
    # and its log has both starts with what it printed, and its own environment
    made.logs()
    logged = (logs / "server.log").read_text()
    assert logged.count(STARTING) == logged.count("serving mine") == 2


def test_a_role_without_a_port_is_ready_once_it_has_logged(processes):
    made, _ = processes
    made.start(RoleSpec("quiet", (sys.executable, "-c", "import time; time.sleep(3600)")))
    made.start(RoleSpec("ends", (sys.executable, "-c", "print('done'); raise SystemExit(3)")))
    eventually(lambda: made.look("ends").exit_code == 3, "its own exit code")
    assert not made.look("quiet").ready


def group_is_gone(leader: int) -> bool:
    try:
        os.killpg(leader, 0)
    except ProcessLookupError:
        return True
    return False


def test_closing_ends_all_that_a_role_started(processes, role):
    made, logs = processes
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
    made.start(RoleSpec(role.name, (sys.executable, "-c", parent, *role.command[2:]), role.env))
    eventually(lambda: "serving" in (logs / "server.log").read_text(), "the child's line")
    pid = made.look("server").pid
    made.close(10.0)
    if pid is not None:  # of this machine: its process group is gone, once init has reaped it
        eventually(lambda: group_is_gone(pid), "the end of its process group")
    assert made.look("server").exit_code is not None


def test_what_cannot_be_started_is_an_error_at_once(processes):
    made, _ = processes
    with pytest.raises(UserError, match="cannot start broken"):
        made.start(RoleSpec("broken", ("/nowhere/python",)))
