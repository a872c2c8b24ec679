"""Commands that look once: what keeps them from a verdict is said, and is no verdict."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from verify.__main__ import main

UNREADABLE, INTERNAL, INTERRUPTED, NOBODY_READS = 2, 3, 130, 141


@pytest.fixture
def activations(tmp_path: Path) -> Path:
    path = tmp_path / "activations.npy"
    np.save(path, np.random.default_rng(0).normal(size=(70, 64)).astype(np.float32))
    return path


def shell(words: str, *arguments: object) -> tuple[int, str]:
    """The exit code of a shell's words, $0 the command, and what it said to standard error."""
    done = subprocess.run(
        ["bash", "-c", words, f"{sys.executable} -m verify", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("words", "place"),
    [
        ("$0 prove $1 > /dev/full", "standard output: cannot be written: No space left"),
        ("$0 check $1 - < /dev/null > /dev/full", "standard output: cannot be written"),
    ],
)
def test_what_cannot_be_written_or_read_is_named(words: str, place: str, activations: Path) -> None:
    code, said = shell(words, activations)
    assert code == UNREADABLE
    assert said.startswith(place) and "\n  remedy: " in said
    assert "Traceback" not in said


@pytest.mark.parametrize("words", ["$0 prove $1", "$0 check $1 /dev/null"])
def test_whoever_read_the_output_may_go(words: str, activations: Path) -> None:
    code, said = shell(f"{words} | true; exit ${{PIPESTATUS[0]}}", activations)
    assert (code, said) == (NOBODY_READS, "")


def test_ctrl_c_is_no_fault(activations: Path) -> None:
    # given a check that waits for its proofs
    process = subprocess.Popen(
        [sys.executable, "-m", "verify", "check", str(activations), "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    _wait_until_it_maps(activations, process.pid)
    # when a person ends it
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)
    # then it says so
    assert (process.returncode, *said) == (INTERRUPTED, "", "interrupted\n")


def _wait_until_it_maps(path: Path, pid: int) -> None:
    until = time.monotonic() + 60.0
    while str(path) not in Path(f"/proc/{pid}/maps").read_text():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize("role", ["validator", "coordinator"])
def test_what_is_no_public_key_is_bad_usage(
    role: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A validator would ask for a quarter of an hour before it had anything to compare it with."""
    url, key = "http://127.0.0.1:1", tmp_path / "root.pub"
    rest = {
        "validator": ["--run", "r", "--coordinator", url, "--key", "k", "--dir", "d"],
        "coordinator": [str(tmp_path), "--listen", "127.0.0.1:0"],
    }
    with pytest.raises(SystemExit) as ended:
        main([role, *rest[role], "--weights", url, "--public-key", str(key)])
    assert ended.value.code == 2
    assert "--public-key: 64 hex characters" in capsys.readouterr().err
