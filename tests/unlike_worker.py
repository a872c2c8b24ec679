"""A real worker on devices that it fakes by name, slower than it is.

python -m tests.unlike_worker NAME FOLDER KEY
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import sampler.worker as roles
from runspec.core.process import Role, run_role, stop_event
from sampler.worker.worker import Worker
from verify.formats.submission import Rollout

WORKERS = {
    "fast": (0.0, {"device": "cpu", "tensor": 1}),
    "slow": (1.0, {"device": "cpu-b", "tensor": 2}),
    "unknown": (0.2, {"device": "cpu-c", "tensor": 1}),
}
"""Seconds that each takes longer than it needs for a group, and what it says of itself."""
POOL = "volunteers"


def main(name: str, folder: Path, key: Path) -> int:
    late_s, devices = WORKERS[name]

    class Throttled(Worker):
        def finish(self, rollouts: list[Rollout]) -> list[Rollout]:
            time.sleep(late_s)
            return rollouts

    roles.about = lambda pool: devices
    role, stop = Role.load(POOL, folder, key_file=key), stop_event()
    return run_role(name, lambda log: roles.work(role, log, stop, worker=Throttled))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])))
