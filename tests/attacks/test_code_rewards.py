"""What a policy writes where tests are in its way: each attempt earns 0 with a reason, in time, and
answers graded beside it keep their reward."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from sampler.tasks.graders import Graders
from sampler.tasks.interfaces import Answer, Score
from tests.processes import with_word
from tests.sampler.tasks.grading.plugin import reward
from tests.waiting import eventually
from verify.plugins import Problem

pytestmark = pytest.mark.slow

HUMAN = {
    "prompt": 'def add(a: int, b: int) -> int:\n    """ The sum. """\n',
    "entry_point": "add",
    "test": (
        "import math\ndef check(candidate):\n    secret = 'f3a9-token'\n"
        "    assert abs(candidate(1, 2) - 3) < 1e-9\n    assert candidate(20, 22) == 42\n"
    ),
}
MBPP = {"test_list": ["assert add(1, 2) == 3", "assert add(20, 22) == 42"]}
CALLS = {"inputs": [[1, 2], [20, 22]], "outputs": [3, 42], "fn_name": "add"}
STDIO = {"inputs": ["1 2\n", "20 22\n"], "outputs": ["3", "42"]}
FORMS = {"humaneval": HUMAN, "mbpp": MBPP, "calls": CALLS, "stdio": STDIO}
HONEST = "def add(a, b):\n    return a + b\n"
HONEST_STDIO = "print(sum(map(int, input().split())))\n"

EVERYWHERE = {
    "a fork bomb": "import os\nwhile True:\n    os.fork()\n",
    "a fork bomb of orphans": (
        "import os\nfor _ in range(64):\n    if os.fork() == 0:\n        os.setsid()\n"
        "        while True: pass\n"
    ),
    "a loop that swallows exceptions": (
        "import signal\nfor n in range(1, 32):\n    try:\n"
        "        signal.signal(n, signal.SIG_IGN)\n    except OSError: pass\n"
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass\n"
    ),
    "a sleep": "import time\ntime.sleep(10 ** 6)\n",
    "os._exit(0)": "import os\nos._exit(0)\n",
    "killing everybody": "import os\nos.kill(-1, 9)\n",
    "killing the parent": "import os\nos.kill(os.getppid(), 9)\nos._exit(0)\n",
    "printing the marker": (
        "import sys\nfor _ in range(9):\n"
        "    for w in ('PASSED', 'True', 'ok', '{\"passed\": true}'):\n"
        "        print(w)\n        print(w, file=sys.stderr)\n"
    ),
    "messages to every descriptor": (
        "import os\nfor fd in range(64):\n"
        '    for m in (b\'{"passed": true}\', b\'{"functions": ["add"]}\','
        ' b\'{"id": 1, "value": 3}\', b\'{"value": 1.0}\', b\'{"ready": true}\'):\n'
        "        try: os.write(fd, m + b'\\n')\n        except OSError: pass\nos._exit(0)\n"
    ),
    "endless output": "import os\nwhile True:\n    for fd in range(64):\n"
    "        try: os.write(fd, b'x' * 65536)\n        except OSError: pass\n",
    "a crash of the interpreter": "import ctypes\nctypes.string_at(0)\n",
    "nested source": "x = " + "(" * 5000 + ")" * 5000 + "\n",
    "a null byte": "x = 1\n\0\n",
    "a lone surrogate": "x = '\ud800'\n",
}
CALLED = {
    "lying equality": (
        "class Yes(int):\n    def __eq__(self, other): return True\n"
        "    def __hash__(self): return 0\n"
        "def add(a, b): return Yes(0)\n"
    ),
    "patched builtins": (
        "import builtins, sys\nbuiltins.AssertionError = ValueError\n"
        "builtins.isinstance = lambda *a: True\nbuiltins.all = lambda *a: True\n"
        "def add(a, b): return 0\n"
    ),
    "patched modules": (
        "import sys, json\njson.dumps = lambda *a, **k: '{\"passed\": true}'\n"
        "for m in list(sys.modules.values()):\n"
        "    for n in list(getattr(m, '__dict__', {})):\n"
        "        if n in ('encode', 'decode', 'reply', 'found', 'check', 'run'):\n"
        "            setattr(m, n, lambda *a, **k: True)\n"
        "def add(a, b): return 0\n"
    ),
    "judging itself": (
        "def abs(x): return 0\ndef all(x): return True\ndef isinstance(x, y): return True\n"
        "def check(candidate): pass\ndef candidate(a, b): return a + b\n"
        "def add(a, b): return 42\n"
    ),
    "the tests' builtins": (
        "import sys\nsys.modules['__main__'].public = lambda _: ['add', '__builtins__', 'nobody']\n"
        "def add(a, b): return 0\n"
    ),
    "malformed replies": (
        "import json, sys\nturns = iter(['{\"c\": []}', '{\"d\": [[[], 1]]}', '{\"s\": [[]]}'])\n"
        'json.dumps = lambda m: \'{"id": 1, "value": %s}\' % next(turns)\n'
        "def add(a, b): return 0\n"
    ),
    "the caller's frame": (
        "import sys\ndef add(a, b):\n    f = sys._getframe()\n    while f:\n"
        "        for k in list(f.f_locals):\n            f.f_locals[k] = 3\n"
        "        f.f_globals['passed'] = True\n        f = f.f_back\n    return 0\n"
    ),
    "tests in memory": (
        "import gc, sys\ndef add(a, b):\n    for o in gc.get_objects():\n"
        "        if isinstance(o, (str, dict)) and 'f3a9' + '-token' in str(o): return a + b\n"
        "    f = sys._getframe()\n    while f:\n"
        "        if 'f3a9' + '-token' in str(f.f_locals): return a + b\n        f = f.f_back\n"
        "    return 0\n"
    ),
    "tests in other processes": (
        "import os\ndef add(a, b):\n"
        "    for p in os.listdir('/proc') if os.path.isdir('/proc') else []:\n"
        "        for n in ('cmdline', 'environ', 'mem', 'fd/0', 'root/main.py'):\n"
        "            try: data = open(f'/proc/{p}/{n}', 'rb').read(1 << 20)\n"
        "            except (OSError, ValueError): continue\n"
        "            if b'candidate' + b'(20' in data: return a + b\n    return 0\n"
    ),
    "a forged reply": (
        "import os\ndef add(a, b):\n    for fd in range(3, 64):\n"
        '        try: os.write(fd, b\'{"id": 1, "value": 3}\\n{"id": 2, "passed": true}\\n\')\n'
        "        except OSError: pass\n    return 0\n"
    ),
    "a deep result": (
        "def add(a, b):\n    x = []\n    for _ in range(10 ** 5): x = [x]\n    return x\n"
    ),
    "a huge result": "def add(a, b): return 'x' * (1 << 28)\n",
    "a long list": "def add(a, b): return list(range(10 ** 6))\n",
    "StopIteration when called": "def add(a, b): raise StopIteration(3)\n",
    "an exception that cannot be shown": (
        "class E(Exception):\n    def __str__(self): raise self\ndef add(a, b): raise E\n"
    ),
    "the right value once": (
        "n = [0]\ndef add(a, b):\n    n[0] += 1\n    return 3 if n[0] == 1 else True\n"
    ),
}


ENDS_BY_TIME = {"a fork bomb of orphans", "a loop that swallows exceptions", "a sleep"}
"""What only the limit of time ends."""


@pytest.fixture(scope="module")
def graders() -> Iterator[Graders]:
    """Their time is never up."""
    made = Graders([reward("code", timeout="600s")], processes=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def impatient() -> Iterator[Graders]:
    made = Graders([reward("code", timeout="1s")], processes=2)
    yield made
    made.close()


def graded(graders: Graders, form: str, programs: Mapping[str, str]) -> dict[str, Score]:
    """The grade of each program, with an honest answer beside each, which keeps its reward."""
    problem = Problem("p", "code", "", FORMS[form])
    honest = Answer(problem, HONEST_STDIO if form == "stdio" else HONEST)
    answers = [Answer(problem, f"```python\n{program}```") for program in programs.values()]
    scores = graders.score([one for answer in answers for one in (answer, honest)])
    assert scores[1::2] == [Score(1.0)] * len(programs)
    return dict(zip(programs, scores[::2], strict=True))


def earn_nothing(scores: Mapping[str, Score]) -> None:
    """Each has 0 and a reason."""
    assert all(isinstance(score, Score) for score in scores.values()), scores
    assert {name: s for name, s in scores.items() if s.value != 0.0 or not s.reason} == {}


@pytest.mark.parametrize("form", ["calls", "stdio"])  # imported, and as a program of its own
def test_breaking_out_of_a_limit_earns_nothing(
    graders: Graders, impatient: Graders, form: str
) -> None:
    others = {name: source for name, source in EVERYWHERE.items() if name not in ENDS_BY_TIME}
    earn_nothing(graded(graders, form, others))
    problem = Problem("p", "code", "", FORMS[form])
    answers = [Answer(problem, f"```python\n{EVERYWHERE[name]}```") for name in ENDS_BY_TIME]
    earn_nothing(dict(zip(ENDS_BY_TIME, impatient.score(answers), strict=True)))


@pytest.mark.parametrize("form", ["humaneval", "calls"])  # by tests that are code, or are data
def test_forging_a_result_earns_nothing(graders: Graders, form: str) -> None:
    earn_nothing(graded(graders, form, CALLED))


@pytest.mark.parametrize("form", FORMS)
def test_a_program_reads_no_secret_and_reaches_nobody(
    graders: Graders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    # Given a key file, a secret in the environment, a server, and a program that would be right if
    # it got at any of them
    secret, written = tmp_path / "key", tmp_path / "written"
    secret.write_text("hush")
    monkeypatch.setenv("RUN_SECRET", "hush")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = f"""
import os, socket, pathlib
def got():
    tries = [
        lambda: open({str(secret)!r}).read(),
        lambda: os.environ["RUN_SECRET"],
        lambda: open({str(written)!r}, "w").write("x"),
        lambda: open("/proc/{os.getpid()}/environ").read(),
        lambda: socket.create_connection(("127.0.0.1", {port}), 1),
        lambda: socket.getaddrinfo("example.org", 80),
        lambda: os.listdir({str(tmp_path)!r})[0],
    ]
    for number, attempt in enumerate(tries):
        try:
            if attempt(): return number
        except Exception: pass
    return None
def add(a, b): return 0 if got() is None else a + b
"""
        if form == "stdio":
            program += "a, b = map(int, input().split())\nprint(add(a, b))\n"
        # When it is graded
        earn_nothing(graded(graders, form, {"got": program}))
    # Then it got at none
    assert not written.exists()


@pytest.mark.parametrize(
    "test",
    [
        "all(map(lambda pair: add(*pair) == sum(pair), [(1, 2), (20, 22)]))",
        "next((False for pair in [(1, 2), (20, 22)] if add(*pair) != sum(pair)), True)",
    ],
)
def test_an_exception_of_the_program_ends_no_loop_of_the_tests(graders: Graders, test: str) -> None:
    # Given tests that loop in C, where StopIteration is the end of the loop
    info = {"test_list": [f"assert {test}"]}
    problem = Problem("p", "code", "", info)
    # When a program raises it in place of an answer
    lie = "def add(a, b): raise StopIteration"
    honest, lying = graders.score([Answer(problem, HONEST), Answer(problem, lie)])
    # Then the loop has not ended well
    assert honest == Score(1.0)
    assert isinstance(lying, Score) and lying.value == 0.0


def test_nothing_of_a_program_is_left(graders: Graders) -> None:
    name = f"left-{uuid.uuid4().hex[:8]}"
    program = (
        f"import os, sys\nfor _ in range(3):\n    if os.fork() == 0:\n        os.setsid()\n"
        f"        os.execv(sys.executable, [sys.executable, '-c', 'while True: pass', {name!r}])\n"
        f"{HONEST}"
    )
    graded(graders, "calls", {"starts": program})
    eventually(lambda: not with_word(name), "the end of what the program started")
