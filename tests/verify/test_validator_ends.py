"""A validator that is told to end: within the grace, whatever it is at, and nothing is lost."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from runspec.core.keys import SigningKey
from verify.watchdog import GRACE_S, RELEASE_S

pytestmark = pytest.mark.slow

ROOM_S = 20.0
"""For a machine that others use too."""


def end(process: subprocess.Popen[str], after: str) -> tuple[int, str]:
    """Told to end once it has said something: exit code, and what else it said."""
    assert process.stderr is not None
    said = next((line for line in process.stderr if after in line), "")
    assert said, "it said nothing like that"
    told = time.monotonic()
    process.send_signal(signal.SIGTERM)
    _, rest = process.communicate(timeout=60)
    assert time.monotonic() - told < GRACE_S + RELEASE_S + ROOM_S
    return process.returncode, said + rest


@pytest.mark.parametrize(
    ("options", "after"),
    [((), "waiting for the coordinator"), (("-X", "importtime"), "verify.examiner")],
    ids=["it waits for a quarter of an hour", "it is still importing"],
)
def test_one_that_finds_no_coordinator_ends_within_the_grace(
    tmp_path: Path, options: tuple[str, ...], after: str
) -> None:
    key = tmp_path / "validator.key"
    SigningKey.generate().save(key)
    with socket.socket() as nobody:  # bound and not listening: whoever connects is refused
        nobody.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{nobody.getsockname()[1]}"
        process = subprocess.Popen(
            [
                *(sys.executable, *options, "-m", "verify", "validator", "--run", "tiny"),
                *(
                    "--coordinator",
                    url,
                    "--weights",
                    url,
                    "--public-key",
                    SigningKey.generate().public_hex,
                ),
                *("--key", str(key), "--dir", str(tmp_path / "validator")),
            ],
            stderr=subprocess.PIPE,
            text=True,
        )
        code, said = end(process, after)
    assert code == 0 and "Traceback" not in said


COMPUTES = """
import logging, sys, threading, time
from runspec.core.process import run_role, stop_event
from verify import watchdog

watchdog.GRACE_S = 0.3

class Client:
    claims = ["ab" * 32, "cd" * 32]
    def release_claims(self, submissions, fault=""):
        print("gives back", *submissions, repr(fault), file=sys.stderr, flush=True)
        {away}

def body(log):
    with watchdog.leaving(stop_event(), Client(), log):
        print("computes", file=sys.stderr, flush=True)
        time.sleep({seconds})
    print("has judged", file=sys.stderr, flush=True)

sys.exit(run_role("validator", body))
"""


def computing(seconds: float, away: str = "pass") -> subprocess.Popen[str]:
    script = COMPUTES.format(seconds=seconds, away=away)
    return subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)


def test_one_that_computes_for_long_gives_back_what_it_has_claimed_without_a_word() -> None:
    code, said = end(computing(600), "computes")
    assert code == 0 and f"gives back {'ab' * 32} {'cd' * 32} ''" in said
    assert "has judged" not in said


def test_one_that_cannot_give_back_ends_all_the_same() -> None:
    code, said = end(computing(600, away="time.sleep(600)"), "computes")
    assert code == 0 and "gives back" in said


def test_one_that_is_soon_done_hands_in_what_it_has_judged() -> None:
    code, said = end(computing(0.1), "computes")
    assert code == 0 and "has judged" in said and "gives back" not in said
