"""`runspec apply --detach`: the supervisor as a process of its own.

python -m runspec.cli.background RUN_DIR LOCK    (started by `apply`, which hands the lock over)
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from runspec.cli import exit_code_of
from runspec.local.apply import supervise
from runspec.local.children import last_lines
from runspec.local.prepared import PreparedRun
from runspec.local.run_dir import sign_lock
from runspec.local.signals import EXIT_INTERRUPTED, StopSignals
from runspec.local.state import RunState

LOG = "supervisor.log"
START_PATIENCE_S = 600.0
_LINES = 20
_POLL_S = 0.2


def start_in_background(run: PreparedRun) -> int:
    """Starts the supervisor of an open run and waits until its roles have started.

    Returns:
        0; or the supervisor's exit code where it has ended by then.
    """
    log = run.directory / "logs" / LOG
    log.parent.mkdir(exist_ok=True)
    with closing(RunState(run.directory)) as state:
        before = state.sessions()
        with log.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "runspec.cli.background", str(run.directory), str(run.lock)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(run.lock,),
            )
        deadline = time.monotonic() + START_PATIENCE_S
        while time.monotonic() < deadline:
            code = process.poll()
            row = state.run()
            if code is not None:
                print("\n".join(last_lines(log, _LINES)), file=sys.stderr)
                return code
            if state.sessions() > before and row is not None and row.state == "running":
                break
            time.sleep(_POLL_S)
        else:
            print(f"The roles have not started within {START_PATIENCE_S:.0f} s; it goes on.")
    name = run.spec.name
    print(f"{name} runs in the background, watched by process {process.pid}. To follow it:")
    print(f"  runspec status {run.directory}\n  runspec logs {run.directory} -f")
    print(f"To stop it: runspec pause {run.directory}; to go on: runspec resume {run.directory}")
    return 0


def main(arguments: list[str]) -> int:
    """Supervises a run whose lock this process was started with."""
    from runspec.cli.view import PlainView

    run_dir, lock = Path(arguments[0]), int(arguments[1])
    sign_lock(lock)
    run = PreparedRun.inherited(run_dir, lock)
    with StopSignals() as requests:
        outcome = supervise(run, PlainView(run.spec.steps, sys.stdout), requests)
    if outcome.kind == "interrupted":
        print(f"interrupted by {requests.last}")
        return EXIT_INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(lambda: main(sys.argv[1:])))
