"""How long no step is trained after a process was killed: the engine, the supervisor."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks.runs import apply_command

WARM_STEPS, STEPS_AFTER = 10, 10
STEPS = 10_000
LEAST_S = 20.0
"""What was sampled before a kill is trained after it: the pause does not begin at once."""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="runspec-bench-") as temporary:
        folder = Path(temporary)
        command = apply_command("recovery", {"steps": STEPS}, folder)
        run_dir = folder / "recovery"
        figures = {}
        supervisor = _start(command)
        try:
            _await_steps(run_dir, WARM_STEPS)
            for what in ("engine", "supervisor"):
                killed = time.time()
                if what == "engine":
                    os.kill(_engine(supervisor.pid), signal.SIGKILL)
                else:
                    supervisor.kill()
                    supervisor.wait()
                    supervisor = _start(command)
                figures[what] = _pause_s(run_dir, killed)
                _show_logs(run_dir, killed)
        finally:
            supervisor.send_signal(signal.SIGTERM)
            supervisor.wait()
    print(json.dumps({"benchmark": "recovery", "seconds_without_a_step": figures}))
    return 0


def _start(command: list[str]) -> subprocess.Popen[bytes]:
    print("+", *command, file=sys.stderr, flush=True)
    return subprocess.Popen(command, stdout=sys.stderr)


def _engine(supervisor: int) -> int:
    """The process of vLLM's core: the newest of the descendants that is called so."""
    lines = subprocess.check_output(["ps", "-eo", "pid=,ppid=,args="], text=True).splitlines()
    fields = [line.split(None, 2) for line in lines]
    rows = [(int(pid), int(parent), args) for pid, parent, args in fields]
    parent_of = {pid: parent for pid, parent, _ in rows}

    def is_ours(pid: int) -> bool:
        while pid and pid != supervisor:
            pid = parent_of.get(pid, 0)
        return pid == supervisor

    return max(pid for pid, _, args in rows if "EngineCore" in args and is_ours(pid))


def _times(run_dir: Path) -> list[float]:
    """When each step was trained, seconds since the epoch."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line)["time"] for line in lines]


def _await_steps(run_dir: Path, count: int) -> None:
    while len(_times(run_dir)) < count:
        time.sleep(0.1)


def _pause_s(run_dir: Path, killed: float) -> float:
    """Longest time between two steps, once some were trained after it and `LEAST_S` have passed."""
    while True:
        before = [at for at in _times(run_dir) if at < killed]
        after = [at for at in _times(run_dir) if at >= killed]
        times = [max(before), *after]
        gaps = [later - earlier for earlier, later in pairwise(times)]
        late = time.time() - killed > LEAST_S
        if late and gaps and len(gaps) - gaps.index(max(gaps)) > STEPS_AFTER:
            return round(max(gaps), 1)
        time.sleep(0.1)


def _show_logs(run_dir: Path, since: float) -> None:
    """What the roles said since the kill, in the order of time."""
    moment = time.strftime("%H:%M:%S", time.localtime(since))
    print(f"--- killed at {moment}", file=sys.stderr)
    for log in sorted((run_dir / "logs").glob("*.log")):
        print(f"== {log.name}", file=sys.stderr)
        lines = log.read_text(errors="replace").splitlines()
        for line in lines:
            if (len(line) > 19 and line[11:19] >= moment) or line.startswith("---"):
                print("   ", line[:200], file=sys.stderr)


if __name__ == "__main__":
    raise SystemExit(main())
