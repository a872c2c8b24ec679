"""Runs of 60 steps take at most 1.5 times as long while hostile keys attack them.

Real runs of the laptop profile: two undisturbed, and one under each attack of
`tests.attacks.hostile_keys`. Seconds count from the first lease of the run's own worker to the last
step's batch; factors are over the faster one of the undisturbed runs, for the first one compiles.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

from benchmarks.runs import apply_command
from runspec.core.run_files import STATE_FILE
from runspec.core.schema.load import load_resolved
from runspec.core.signed import SigningKey
from tests.attacks.hostile_keys import hostile
from verify.coordinator.ledger import Ledger
from verify.coordinator.machine.events import KeyBanned, LeaseGranted, LeaseOverdue, StepClosed
from verify.coordinator.machine.events import WorkerQuarantined as Quarantined
from verify.coordinator.machine.state import Policy
from verify.coordinator.machine.transitions import replay

STEPS = int(os.environ.get("LIVENESS_STEPS", "60"))
RUNS: Mapping[str, Mapping[str, int]] = {
    "undisturbed, cold": {},
    "undisturbed": {},
    "rubbish": {"rubbish": 8},
    "silent": {"silent": 8},
    "alternating": {"alternating": 1},
}
"""Hostile keys of each attack."""
MOST = 1.5
"""Of the promise."""


def run() -> dict[str, dict[str, object]]:
    """Seconds and factor of each run, and what became of the hostile keys.

    Raises:
        AssertionError: a factor is beyond 1.5, or the run's own worker is banned or in quarantine.
    """
    found: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory(prefix="liveness-") as folder:
        alone = math.inf
        for name, keys in RUNS.items():
            seconds, figures = _measured(Path(folder) / name.replace(", ", "-"), keys)
            alone = alone if keys else min(alone, seconds)
            found[name] = {"seconds": round(seconds, 1), "factor": round(seconds / alone, 2)}
            found[name] |= figures
            print(name, found[name], file=sys.stderr, flush=True)
    assert all(found[name]["factor"] <= MOST for name, keys in RUNS.items() if keys), found
    return found


def _measured(folder: Path, keys: Mapping[str, int]) -> tuple[float, dict[str, object]]:
    """Seconds that a run took, and what became of the strangers."""
    command, run_dir = apply_command("liveness", {"steps": STEPS}, folder), folder / "liveness"
    with subprocess.Popen(command, stdout=sys.stderr) as process, hostile(run_dir, keys):
        code = process.wait()
    assert code == 0, f"the run ended with code {code}"
    with closing(Ledger(run_dir / STATE_FILE)) as ledger:
        events = list(ledger.events())
    own = SigningKey.load(run_dir / "keys" / "volunteers-0.key").public_hex
    state = replay(Policy.of(load_resolved(run_dir)), events)
    assert own not in state.bans and state.workers[own].standing.quarantine is None
    granted = [event for event in events if isinstance(event, LeaseGranted)]
    begun = next(event.at for event in granted if event.lease.worker == own)
    closed = [event.at for event in events if isinstance(event, StepClosed)]
    assert len(closed) == STEPS
    others = [state.workers[key].standing for key in state.workers if key != own]
    return closed[-1] - begun, {
        "strangers": len(others),
        "their groups leased": sum(e.lease.groups for e in granted if e.lease.worker != own),
        "submissions accepted": sum(each.accepted for each in others),
        "rejected": sum(each.rejected for each in others),
        "leases withheld": sum(each.withheld for each in others),
        "overdue": sum(isinstance(event, LeaseOverdue) for event in events),
        "quarantined": sum(isinstance(event, Quarantined) for event in events),
        "banned": sum(isinstance(event, KeyBanned) for event in events),
    }
