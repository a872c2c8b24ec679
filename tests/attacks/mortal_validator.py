"""A validator's process that dies of certain rollouts, as one with a fault of ours would.

`python -m tests.attacks.mortal_validator URL ROOT_KEY DIRECTORY`. DIRECTORY/poison holds a file for
each rollout that kills, named by its noise key. Everything else is the real validator: its
checks and its client. The model is the small one of the tests.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from pathlib import Path

from tests.verify.bench import MODEL
from tests.verify.small_model import RUN, NumpyEngine, ParityTask, fixed_key
from verify.client import CoordinatorClient
from verify.validator import Validator

VALIDATOR = fixed_key(4)


def poison(directory: Path, key: tuple[int, int]) -> Path:
    """The file that makes the rollout of a noise key poison; no other rollout has its key."""
    return directory / "poison" / "{}_{}".format(*key)


class MortalEngine(NumpyEngine):
    def prefill(self, version, inputs, **options):
        for each in inputs:
            if poison(self.directory, each.noise_key).exists():
                os.kill(os.getpid(), signal.SIGKILL)
        return super().prefill(version, inputs, **options)


def main(url: str, root_key: str, directory: Path) -> None:
    engine = MortalEngine({0: MODEL}, directory)
    client = CoordinatorClient(url, VALIDATOR, run=RUN, root_public_key=root_key)
    Validator(
        *(client.spec(), VALIDATOR, client, engine),
        task_set_of=lambda weights: ParityTask(),
        log=logging.getLogger("validator"),
    ).serve(threading.Event())


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
