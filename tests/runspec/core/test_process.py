"""Role processes: exit codes, and a death that follows the parent's."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from runspec.core import process

BODY = """
import errno
from runspec.core.errors import UserError
from runspec.core.process import RunStopped, not_retried, run_role
@not_retried()
def load(error, cause=None):
    raise error from cause
def body(log):
    {body}
raise SystemExit(run_role("tester", body))
"""


@pytest.mark.parametrize(
    ("body", "code", "said"),
    [
        ("log.info('done')", 0, "done"),
        ("raise UserError('port 1 is taken', place='here', remedy='wait')", 1, "remedy: wait"),
        ("raise ValueError('odd')", 3, "ValueError: odd"),
        ("raise RunStopped('stalled at step 3')", process.EXIT_FINAL, "stalled at step 3"),
        ("load(UserError('no such pool', remedy='name one'))", process.EXIT_FINAL, "name one"),
        ("load(UserError('gone'), FileNotFoundError('a'))", process.EXIT_FINAL, "gone"),
        ("load(UserError('full'), OSError(errno.ENOSPC, 'full'))", 1, "full"),
        ("load(OSError(errno.ENOSPC, 'no space left'))", 3, "no space left"),
        ("load(KeyError('gold'))", process.EXIT_FINAL, "KeyError: 'gold' at <string>:7"),
    ],
)
def test_exit_codes_tell_a_persons_error_from_ours(body, code, said):
    done = subprocess.run(
        [sys.executable, "-c", BODY.format(body=body)], capture_output=True, text=True, check=False
    )
    assert done.returncode == code
    assert said in done.stderr
    assert "tester" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_role_ends_when_its_supervisor_is_killed(tmp_path):
    # given a supervisor that starts a role, which waits for its stop event
    role = tmp_path / "role.py"
    role.write_text(
        textwrap.dedent(
            """
            import os, pathlib
            from runspec.core.process import run_role, stop_event
            def body(log):
                event = stop_event()
                pathlib.Path("pid").write_text(str(os.getpid()))
                event.wait(60)
            raise SystemExit(run_role("role", body))
            """
        )
    )
    start = f"""
import os, subprocess, sys
environment = os.environ | {{{process.SUPERVISOR!r}: str(os.getpid())}}
subprocess.run([sys.executable, {str(role)!r}], env=environment)
"""
    supervisor = subprocess.Popen([sys.executable, "-c", start], cwd=tmp_path)
    deadline = time.monotonic() + 20
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline, "the role did not start"
    pid = int((tmp_path / "pid").read_text())
    # when the supervisor is killed
    supervisor.send_signal(signal.SIGKILL)
    supervisor.wait()
    # then the role is gone soon
    while _is_alive(pid):
        assert time.monotonic() < deadline, "the role outlived its supervisor"


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_role_whose_supervisor_died_before_it_began_ends_at_once():
    # given a supervisor that is gone, so that another process is the role's parent
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    # when the role starts
    program = BODY.format(body="raise SystemExit('it ran')")
    environment = os.environ | {process.SUPERVISOR: str(gone.pid)}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, timeout=20)
    # then it ends before its work begins
    assert ended.returncode == -signal.SIGTERM


def _is_alive(pid: int) -> bool:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return fields.rsplit(")", 1)[1].split()[0] != "Z"
