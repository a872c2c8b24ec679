"""Some cases of each lane of `make fuzz`: whatever is sent, a value or the parser's own error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.__main__ import Fault, Progress, watch
from tests.fuzz.bounds import costly
from tests.fuzz.fast.child import PLACE
from tests.fuzz.fast.lanes import LANES, Lane
from tests.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

HERE = [lane for lane in LANES if not lane.may_die]
"""Those that may end the process have their cases in `test_decoder`, where it is a child."""


@cache
def case_of(lane: Lane) -> Callable[[Random], bool]:
    return lane.case()


@pytest.mark.parametrize("lane", HERE, ids=lambda lane: lane.name)
@settings(costly, max_examples=max(1, costly.max_examples // 4))
@given(seed=st.integers(0, 2**48))
def test_lanes(lane: Lane, seed: int) -> None:
    case_of(lane)(Random(seed))


def fuzz(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def watched(lane: Lane, seen: Path, code: str, progress: Progress | None = None) -> Progress:
    """A lane whose process runs some code while it is at case 7, unless the code says another."""
    seen.write_bytes(PLACE.pack(7, 2, 0.5))
    progress = progress or Progress(lane, 3, 0, 0)
    with subprocess.Popen([sys.executable, "-c", code, str(seen)]) as child:
        watch(child, progress, seen, (0, 0.0), over=lambda: False)
    return progress


def dies(name: str) -> str:
    core = "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))"
    default = f"import signal; signal.{name} == 9 or signal.signal(signal.{name}, signal.SIG_DFL)"
    return f"{core}; {default}; signal.raise_signal(signal.{name})"


ABORTS = dies("SIGABRT")
IN_ITS_OWN, IN_OURS = LANES[-1], LANES[0]


def test_a_death_is_counted_where_the_parser_has_a_process_of_its_own(tmp_path: Path) -> None:
    progress = watched(IN_ITS_OWN, tmp_path / "seen", ABORTS)
    assert progress.deaths == {"SIGABRT": [7]}
    assert (progress.done, progress.taken) == (8, 2)
    assert "1 ended by SIGABRT (as case 7)" in progress.line()


@pytest.mark.parametrize(
    ("lane", "code"),
    [
        (IN_OURS, ABORTS),
        *((lane, "raise SystemExit(1)") for lane in (IN_OURS, IN_ITS_OWN)),
        *((IN_ITS_OWN, dies(name)) for name in ("SIGPROF", "SIGKILL", "SIGINT", "SIGTERM")),
    ],
)
def test_a_fault_names_its_case_and_how_to_make_it_again(
    tmp_path: Path, lane: Lane, code: str
) -> None:
    with pytest.raises(Fault) as fault:
        watched(lane, tmp_path / "seen", code)
    assert f"python -m tests.fuzz --only '{lane.name}' --seed 3 --case 7" in str(fault.value)


def test_a_process_that_dies_at_its_first_case_is_a_fault(tmp_path: Path) -> None:
    with pytest.raises(Fault, match=r"case 7 .*SIGABRT.* before it had finished any"):
        watched(IN_ITS_OWN, tmp_path / "seen", ABORTS, Progress(IN_ITS_OWN, 3, 0, 7))


@pytest.mark.parametrize(
    ("cases", "before", "fault"),
    [(7, 19, False), (7, 20, True), (3007, 29, False), (3007, 30, True)],
)
def test_so_many_deaths_that_the_lane_does_not_work_are_a_fault(
    tmp_path: Path, cases: int, before: int, fault: bool
) -> None:
    progress = Progress(IN_ITS_OWN, 3, 7 - cases, 0, deaths={"SIGSEGV": [0] * before})
    if fault:
        with pytest.raises(Fault, match=f"as {before} others have: too many"):
            watched(IN_ITS_OWN, tmp_path / "seen", ABORTS, progress)
    else:
        watched(IN_ITS_OWN, tmp_path / "seen", ABORTS, progress)
        assert progress.deaths["SIGABRT"] == [7]


GROWS = """
import mmap, sys
from itertools import count
from pathlib import Path
from tests.fuzz.__main__ import _run
from tests.fuzz.bounds import bounded
from tests.fuzz.fast.lanes import Lane

FIRST, GROWS = 40, 300

def make():
    numbers = count(FIRST)
    def case(rng):
        with bounded(1 << 20):
            if next(numbers) == GROWS:  # as a library does, which Python does not see
                memory = mmap.mmap(-1, 64 << 20)
                while memory.tell() < len(memory):
                    memory.write(bytes(1 << 16))
        return True
    return case

lane = Lane("grows", "__main__", "make")
sys.exit(_run(lane, 3, FIRST, 600, Path(sys.argv[1]), trace=TRACE))
"""


@pytest.mark.parametrize(
    ("trace", "what", "again"),
    [
        (False, "one of the cases 256 to 511,", "find it: * --from 256 --cases 256 --trace"),
        (True, "case 300 took too much memory", "make it again: * --case 300"),
    ],
)
def test_too_much_memory_is_blamed_on_all_cases_since_the_last_look(
    tmp_path: Path, trace: bool, what: str, again: str
) -> None:
    code = GROWS.replace("TRACE", str(trace))
    with pytest.raises(Fault) as fault:
        watched(IN_OURS, tmp_path / "seen", code, Progress(IN_OURS, 3, 40, 40, trace))
    assert what in str(fault.value)
    assert str(fault.value).endswith(
        again.replace("*", f"python -m tests.fuzz --only '{IN_OURS.name}' --seed 3")
    )


def two_lanes() -> subprocess.Popen[str]:
    """In a process group of their own."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz", "--only", "proof", "--only", "roles", "--jobs", "1"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel ends them")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_lane_outlives_what_watches_it(number: signal.Signals) -> None:
    with two_lanes() as running:
        try:
            eventually(lambda: len(of_group(running.pid)) == 2, "its first lane")
            running.send_signal(number)
            running.communicate(timeout=30)  # until nobody has its standard output any more
            assert running.returncode == -number
        finally:
            with suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)


def of_group(group: int) -> list[int]:
    """The processes of a process group."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError):
            if os.getpgid(int(process.name)) == group:
                found.append(int(process.name))
    return found


def test_ctrl_c_ends_every_lane_at_once() -> None:
    with two_lanes() as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "2 lanes, 1 at a time\n"
        os.killpg(running.pid, signal.SIGINT)  # all processes, as a terminal does
        out, err = running.communicate(timeout=600)
    assert (running.returncode, out, err) == (130, "interrupted\n", "")
    with pytest.raises(ProcessLookupError):
        os.killpg(running.pid, 0)


def test_one_case_is_of_one_lane() -> None:
    for lanes in ((), ("--only", "proof", "--only", "roles")):
        refused = fuzz(*lanes, "--case", "7")
        assert refused.returncode == 2 and "name it with --only" in refused.stderr


def test_a_lane_says_how_many_cases_it_had() -> None:
    done = fuzz("--only", "roles", "--seed", "5", "--cases", "300")
    assert done.returncode == 0, done.stderr
    *_, last = done.stdout.splitlines()  # on a slow machine it says before how far it is
    assert last.startswith("done: roles: 300 cases from number 0 of seed 5")
    assert fuzz("--only", "no such").returncode == 2
