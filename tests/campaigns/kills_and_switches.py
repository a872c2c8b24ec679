"""Through 20 kills each step trains whole and once, and of 500 switches none leaves a wrong weight.

A real run of specs/tools.yaml, whose rollouts have several turns, loses one of its processes after
the other by `kill -9`: roles, the engine of vLLM, and the supervisor with all of them. No rollout
is rejected. Then a real engine goes from version to version and samples, each time, what a new
engine of that version samples. KILLS and SWITCHES choose other numbers.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from random import Random

import psutil

from runspec.core.run_files import step_folder
from sampler.engine.requests import SampleRequest
from tests.harness import ROOT, LiveRun
from tests.sampler.engine.models import (
    END_TOKEN,
    perturbed_version,
    running_engine,
    sample,
    save_version,
)
from verify.formats.batch import FILE_NAME
from verify.noise import noise_key

KILLS, SWITCHES = int(os.environ.get("KILLS", "20")), int(os.environ.get("SWITCHES", "500"))
GROUPS, GROUP_SIZE = 16, 8
SUPERVISOR, ENGINE = "supervisor", "engine"
STEPS_BETWEEN = 3
"""From a kill to the next one."""
TOKENS = 8


def run() -> dict[str, dict[str, object]]:
    """Figures of both.

    Raises:
        AssertionError: a group was trained twice, a step is not whole, a rollout was rejected, the
            audit finds something, or a version sampled something else than its own tokens.
    """
    with tempfile.TemporaryDirectory(prefix="kills-") as folder:
        return {"kills": _kills(Path(folder)), "switches": _switches(Path(folder))}


def _kills(folder: Path) -> dict[str, object]:
    steps, random = STEPS_BETWEEN * (KILLS + 1), Random(7)
    killed: dict[str, list[int]] = defaultdict(list)
    changes = {
        "steps": steps,
        "algorithm.prompts_per_step": GROUPS,
        "algorithm.group_size": GROUP_SIZE,
        "warm_start.stop_answer_probability": 0.15,
    }
    with LiveRun(folder / "runs", "kills", changes, ROOT / "specs" / "tools.yaml") as run:
        for number in range(KILLS):
            run.wait_for_step(step := STEPS_BETWEEN * number + 1)
            roles = sorted(name for name, pid in run.pids().items() if pid is not None)
            killed[name := random.choice([*roles, ENGINE, SUPERVISOR])].append(step)
            print(f"step {step}: {name} is killed", file=sys.stderr, flush=True)
            _kill(run, name)
        summary = run.finish()
    assert summary["rollouts_rejected"] == 0
    times = [row["time"] for row in run.metrics()]
    pauses = [later - before for before, later in pairwise(times)]
    # then each step was trained once, of as many groups as it should have, none of them twice
    assert [row["step"] for row in run.metrics()] == list(range(steps))
    batches = [
        json.loads((step_folder(run.dir, step) / FILE_NAME).read_text())["payload"]
        for step in range(steps)
    ]
    groups = [(each["submission"], each["group"]) for batch in batches for each in batch["groups"]]
    assert all(batch["complete"] for batch in batches)
    assert len(groups) == len(set(groups)) == steps * GROUPS
    audit = [sys.executable, "-m", "verify", "audit", str(run.dir)]
    subprocess.run(audit, check=True, stdout=sys.stderr)
    counts = {name: len(at) for name, at in sorted(killed.items())}
    return {
        "steps": steps,
        "groups": len(groups),
        "trained twice": 0,
        "rollouts trained": len(groups) * GROUP_SIZE,
        "rejected": 0,
        "kills": " ".join(f"{name} {count}" for name, count in counts.items()),
        "longest pause, s": round(max(pauses), 1),
    }


def _kill(run: LiveRun, name: str) -> None:
    assert run.process is not None
    if name == SUPERVISOR:
        run.process.kill()
        run.process.wait()
        run.apply()
        return
    victim = run.pids()["volunteers-0" if name == ENGINE else name]
    assert victim is not None
    if name == ENGINE:
        below = psutil.Process(victim).children(recursive=True)
        victim = next((each.pid for each in below if "EngineCore" in each.name()), victim)
    os.kill(victim, signal.SIGKILL)


def _switches(folder: Path) -> dict[str, object]:
    first = save_version(folder / "first")
    versions = [first, perturbed_version(first, folder / "second")]
    requests = [
        SampleRequest(prompt, TOKENS, END_TOKEN, 1.0, noise_key(b"\x07" * 32, 0, number))
        for number, prompt in enumerate([[5, 60, 7], [9, 61, 7, 100]])
    ]
    expected, wrong = [], 0
    for version in versions:
        with running_engine(version) as engine:
            expected.append([each.output_tokens.tolist() for each in sample(engine, requests)])
    assert expected[0] != expected[1]
    with running_engine(first) as engine:
        for number in range(1, SWITCHES + 1):
            engine.load(versions[number % 2], number)
            found = [each.output_tokens.tolist() for each in sample(engine, requests)]
            wrong += found != expected[number % 2]
    assert wrong == 0, f"{wrong} of {SWITCHES} switches"
    return {"switches": SWITCHES, "wrong": wrong}
