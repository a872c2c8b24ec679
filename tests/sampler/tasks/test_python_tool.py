"""The tool `python`: equal programs print equal bytes; what depends on the machine is a fault."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing

import pytest

from runspec.core.schema.source_files import data_digest
from sampler.sandbox.process import REPEATABLE
from sampler.tasks.environment import REPLAY_SHARE, Call
from sampler.tasks.environments import python as tool
from sampler.tasks.environments.python import Python
from sampler.tasks.graders import Graders
from tests.sampler.tasks.conftest import SPECS
from tests.sampler.tasks.grading.plugin import reward
from tests.sampler.tasks.test_environment import spec_playing
from verify.plugins import GraderFault, Problem

PRINTED = {
    "print(2**100)": "1267650600228229401496703205376",
    "import random; print(random.random() == random.Random(0).random())": "True",
    "import random; random.seed(); print(random.random() < .9)": "True",
    "x = 0\nwhile True:\n    x += 1": "stopped: the program executed 1000000 lines",
    "print('a')\n1/0": "a\nZeroDivisionError: division by zero (line 2)",
    "x = (": "SyntaxError: '(' was never closed (program.py, line 1)",
    "import time; time.time()": "RuntimeError: time.time is not there",
    "import datetime; datetime.date.today()": "RuntimeError: date.today is not there",
    "from datetime import datetime; datetime.now()": "RuntimeError: datetime.now is not there",
    "import uuid; uuid.uuid4()": "RuntimeError: os.urandom is not there",
    "import os; print(os.environ['HOME'], os.getpid())": ". 2",
    "import tempfile; print(tempfile.TemporaryFile().read())": "b''",
    "import secrets; secrets.randbits(8)": "RuntimeError: os.urandom is not there",
    "import threading; threading.Thread(target=print).start()": "RuntimeError: can't start new",
    "import os; os.fork()": "BlockingIOError",
    "[0] * 10**10": "MemoryError (line 1)",
    "open('/etc/passwd')": "FileNotFoundError",
    "import numpy": "ModuleNotFoundError",
    "import sys; sys.exit(3)": "exit code 3",
    "input()": "EOFError",
    "pass": "nothing printed",
    "print('x' * 10**6)": "x" * tool.SHOWN_CHARS + " ... cut",
    "print(chr(0xd800))": "UnicodeEncodeError",
}
ADDRESSES = (
    "print(object(), {str(i) for i in range(9)}, hash('a'), id([]), {object() for _ in 'ab'})"
)
DIGITS = """
import hashlib, math, random
found = hashlib.sha256()
for _ in range(5000):
    x = random.uniform(0, 99)
    found.update(repr((math.sin(x), math.exp(x), math.log(x), math.atan(x), x**1.3)).encode())
print(found.hexdigest())
"""
LIMITS = {
    "time": ("sum(range(10**12))", "too much CPU time"),
    "memory": ("len(b'x' * (200 << 20))", "met a limit"),
    "crash": ("import os; os.abort()", "SIGABRT"),
}


@pytest.fixture(scope="module")
def python() -> Python:
    return Python(reward("python"))


@pytest.mark.slow
def test_a_program_is_shown_what_it_printed_up_to_its_error(python):
    for program, words in PRINTED.items():
        assert python.printed(program).startswith(words), program


@pytest.mark.slow
def test_addresses_hashes_and_digits_are_the_same_every_time(python):
    assert len({python.printed(ADDRESSES) for _ in range(5)}) == 1
    # the digits are those of a processor without fused multiplication, on every machine
    command = [sys.executable, "-c", "import random; random.seed(0)\n" + DIGITS]
    done = subprocess.run(
        command, env={**os.environ, **REPEATABLE}, capture_output=True, check=True
    )
    assert python.printed(DIGITS) == done.stdout.decode().strip()


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS)
def test_a_program_that_meets_a_limit_or_a_quarter_at_a_replay_is_a_fault(limit, monkeypatch):
    # given little CPU time, and a validator's share of the limits
    monkeypatch.setattr(tool, "CPU_S", 4.0)
    program, words = LIMITS[limit]
    problem = Problem("p", "python", "Go.", {"ground_truth": "1"})
    calls = [Call(problem, "step", [None, f"python({each})"]) for each in (program, "print(1)")]
    with closing(Graders([reward("python")], processes=1, share=REPLAY_SHARE)) as graders:
        # when a program goes beyond it
        found, after = graders.play(calls)
    # then that is nobody's fault, and the next program runs
    assert isinstance(found, GraderFault) and words in str(found)
    assert after["messages"] == [{"role": "tool", "content": "1"}]
    assert limit != "memory" or Python(reward("python")).printed(program) == "nothing printed"


def test_the_digest_of_the_data_names_the_interpreters_build(monkeypatch):
    monkeypatch.chdir(SPECS)
    kinds = ("python", "calculator")
    before = [data_digest(spec_playing(kind)) for kind in kinds]
    monkeypatch.setattr(sys, "version", "3.11.2 of another compiler")
    after = [data_digest(spec_playing(kind)) for kind in kinds]
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True]
