"""Strange submissions end no validator, page, report or status.

10,000 are judged and shown in memory. In a real run of the laptop profile the run's own worker is
stopped by SIGSTOP in three rounds, each until 70 more submissions of strange keys are rejected;
between the rounds and after them the run goes on. HOSTILE_IN_MEMORY and HOSTILE_A_ROUND choose
other numbers.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from random import Random

from benchmarks.runs import apply_command
from runspec.core.signed import SigningKey
from runspec.local.state import RunState
from tests.attacks.hostile_keys import hostile, standings
from tests.attacks.strange import judge
from tests.harness import HANG_S, standing_still
from tests.verify.bench import MODEL
from tests.verify.small_model import NumpyEngine
from tests.verify.test_validator import sample
from tests.waiting import eventually

IN_MEMORY = int(os.environ.get("HOSTILE_IN_MEMORY", "10000"))
ROUNDS, A_ROUND = 3, int(os.environ.get("HOSTILE_A_ROUND", "70"))
"""While no step closes, strangers get 96 leases: four times the groups of each of three steps."""
KEYS = 60
"""Each is banned after six rejections; what some say of themselves is too long to register."""
STEPS = 60


def run() -> dict[str, dict[str, object]]:
    """What became of the submissions in memory and in the real run.

    Raises:
        AssertionError: something ended, or could not be read.
    """
    with tempfile.TemporaryDirectory(prefix="hostile-") as folder:
        return {"in memory": _in_memory(Path(folder)), "real run": _real(Path(folder))}


def _in_memory(folder: Path) -> dict[str, object]:
    logging.disable(logging.WARNING)  # a line for each rejection
    engine, honest, ends = NumpyEngine({0: MODEL}, folder), sample(0)[0], Counter[str]()
    for seed in range(IN_MEMORY):
        ends[judge(honest, engine, Random(seed))] += 1
    logging.disable(logging.NOTSET)
    return {"submissions": IN_MEMORY, **dict(ends.most_common())}


def _real(folder: Path) -> dict[str, object]:
    changes = {"steps": STEPS, "algorithm.fill.deadline": "2h", "evaluations": "null"}
    command, run_dir = apply_command("hostile", changes, folder), folder / "hostile"
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        try:
            eventually(lambda: _steps(run_dir) > 0, "the first step")
            own = SigningKey.load(run_dir / "keys" / "volunteers-0.key").public_hex
            before, rejected = _processes(run_dir), 0
            worker = next(pid for name, pid in before.items() if "volunteers" in name)
            with hostile(run_dir, {"strange": KEYS}):
                for _ in range(ROUNDS):
                    rejected += A_ROUND
                    with standing_still(worker):
                        _wait(lambda most=rejected: _rejected(run_dir, own) >= most)
                        # then every role is the process that it was, and the run can be read
                        assert process.poll() is None and _processes(run_dir) == before
                        for command in ("status", "describe", "workers"):
                            words = [sys.executable, "-m", "runspec", command, str(run_dir)]
                            subprocess.run(words, check=True, stdout=sys.stderr)
                        steps = _steps(run_dir)
                    _wait(lambda most=steps: _steps(run_dir) > most)
            code = process.wait()
        finally:
            process.terminate()
    assert code == 0 and (run_dir / "summary.json").exists() and (run_dir / "report.html").exists()
    return {"rejected": _rejected(run_dir, own), "keys": KEYS, "steps": STEPS, "restarts": 0}


def _wait(holds: Callable[[], bool]) -> None:
    ends = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < ends, "a round does not end"
        time.sleep(1.0)


def _steps(run_dir: Path) -> int:
    """Steps that are closed."""
    return len([*run_dir.glob("rollouts/step_*/batch.json")])


def _rejected(run_dir: Path, own: str) -> int:
    """Submissions of strangers that were rejected."""
    return sum(standing.rejected for standing in standings(run_dir, own)[1])


def _processes(run_dir: Path) -> dict[str, int]:
    with closing(RunState(run_dir)) as state:
        return {role.name: role.pid for role in state.roles() if role.pid is not None}
