"""`runspec evaluate --with`: how a tool runs beside a server; a campaign has the real ones."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from runspec.cli.evaluate_with import LOG_NAME, run_tool
from runspec.core.errors import UserError
from runspec.core.evaluation_tools import Asked, Measured
from runspec.local.children import StopSignals
from tests.runspec.cli.in_process import runspec

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


class FakeTool:
    """An adapter to a Python program."""

    def __init__(self, program: str) -> None:
        self._program = program

    def command(self, asked: Asked) -> list[str]:
        return [str(asked.python), "-c", self._program, *asked.more]

    def measured(self, out: Path) -> Mapping[str, Measured]:
        raise NotImplementedError


@pytest.fixture
def server() -> Iterator[subprocess.Popen[bytes]]:
    """What stands for the server: a process that goes on."""
    process = subprocess.Popen(SLEEP)
    yield process
    process.kill()
    process.wait(30)


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    (tmp_path / "server.log").write_text("out of memory\n")
    return Asked(Path(sys.executable), "", "m", tmp_path, 64, "task", tmp_path, ())


def ran(program: str, asked: Asked, server: subprocess.Popen[bytes], stops: StopSignals) -> bool:
    return run_tool(FakeTool(program), asked, server, asked.out / "server.log", stops)


def test_what_a_tool_prints_goes_to_its_log(asked: Asked, server: subprocess.Popen[bytes]) -> None:
    program = "import os, sys; print(os.environ['RUNSPEC_API_KEY'], sys.argv[1:])"
    with StopSignals() as stops:
        assert ran(program, replace(asked, more=["-T", "a=b"]), server, stops)
    assert (asked.out / LOG_NAME).read_text() == "none ['-T', 'a=b']\n"


def test_a_tool_that_fails_is_named_with_what_it_printed(
    asked: Asked, server: subprocess.Popen[bytes]
) -> None:
    with StopSignals() as stops, pytest.raises(UserError, match="exit code 3\nno such task"):
        ran("import sys; print('no such task'); sys.exit(3)", asked, server, stops)


@pytest.mark.parametrize("ending", ["server", "signal"])
def test_a_tool_ends_with_the_server_or_on_a_signal(
    asked: Asked, server: subprocess.Popen[bytes], ending: str
) -> None:
    # given a tool that asks for ever, once it runs
    program = (
        "import os, pathlib, signal, sys, time\n"
        "out, server, ending, ours = sys.argv[1:]\n"
        "pathlib.Path(out, 'pid').write_text(str(os.getpid()))\n"
        "number = signal.SIGKILL if ending == 'server' else signal.SIGTERM\n"
        "os.kill(int(server if ending == 'server' else ours), number)\n"
        "time.sleep(600)\n"
    )
    words = [str(asked.out), str(server.pid), ending, str(os.getpid())]
    asked = replace(asked, more=words)
    # when the server dies, or the user presses Ctrl-C
    with StopSignals() as stops:
        if ending == "server":
            with pytest.raises(
                UserError, match="the server ended with exit code -9\nout of memory"
            ):
                ran(program, asked, server, stops)
        else:
            assert not ran(program, asked, server, stops)
    # then the tool is gone
    pid = int((asked.out / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--with", "nothing"), "no adapter 'nothing'"),
        (("--with", "lm-eval", "--task", "t"), "its environment is not named"),
        (("--with", "lm-eval", "--python", "/none"), "there is no /none"),
        (("--with", "lm-eval", "--python", sys.executable), "no task"),
        (("--with", "lm-eval", "--suite", "math"), "--suite beside --with"),
        (("--task", "t"), "--task without --with"),
        (("--", "-T", "a=b"), "options after -- without --with"),
    ],
)
def test_bad_usage_is_named_before_anything_starts(words: tuple[str, ...], message: str) -> None:
    done = runspec("evaluate", "nothing", *words)
    assert done.returncode == 2 and message in done.stderr
