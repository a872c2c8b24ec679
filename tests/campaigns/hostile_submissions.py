"""Strange submissions end no validator, page, report or status.

10,000 are judged and shown in memory. In a real run of the laptop profile the run's own worker is
stopped by SIGSTOP after the first step, until 200 submissions of forty strange keys are rejected;
then the run goes on. HOSTILE_IN_MEMORY and HOSTILE_REJECTED choose other numbers.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import closing
from pathlib import Path
from random import Random

from benchmarks.runs import apply_command
from runspec.core.keys import SigningKey
from runspec.local.state import RunState
from tests.attacks.hostile_keys import hostile, standings
from tests.attacks.strange import judge
from tests.harness import standing_still
from tests.verify.bench import MODEL
from tests.verify.small_model import NumpyEngine
from tests.verify.test_validator import sample
from tests.waiting import eventually

IN_MEMORY = int(os.environ.get("HOSTILE_IN_MEMORY", "10000"))
REJECTED = int(os.environ.get("HOSTILE_REJECTED", "200"))
KEYS = 40
"""Each is banned after six rejections; what some say of themselves is too long to register."""
STEPS = 4


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
    # By default three open steps grant strangers 96 leases of two groups.
    fill = {"algorithm.fill.deadline": "2h", "algorithm.fill.max_groups": 16.0}
    changes = {"steps": STEPS, "evaluations": "null", **fill}
    command, run_dir = apply_command("hostile", changes, folder), folder / "hostile"
    with subprocess.Popen(command, stdout=sys.stderr) as process:
        try:
            eventually((run_dir / "rollouts" / "step_0" / "batch.json").exists, "the first step")
            own = SigningKey.load(run_dir / "keys" / "volunteers-0.key").public_hex
            before = _processes(run_dir)
            worker = next(pid for name, pid in before.items() if "volunteers" in name)
            with standing_still(worker), hostile(run_dir, {"strange": KEYS}):
                eventually(lambda: _rejected(run_dir, own) >= REJECTED, "the last rejection")
                # then every role is the process that it was, and the run can be read
                assert process.poll() is None and _processes(run_dir) == before
                for command in ("status", "describe", "workers"):
                    words = [sys.executable, "-m", "runspec", command, str(run_dir)]
                    subprocess.run(words, check=True, stdout=sys.stderr)
            code = process.wait()
        finally:
            process.kill()
    assert code == 0 and (run_dir / "summary.json").exists() and (run_dir / "report.html").exists()
    return {"rejected": _rejected(run_dir, own), "keys": KEYS, "steps": STEPS, "restarts": 0}


def _rejected(run_dir: Path, own: str) -> int:
    """Submissions of strangers that were rejected."""
    return sum(standing.rejected for standing in standings(run_dir, own)[1])


def _processes(run_dir: Path) -> dict[str, int]:
    with closing(RunState(run_dir)) as state:
        return {role.name: role.pid for role in state.roles() if role.pid is not None}
