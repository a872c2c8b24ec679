"""What goes on beside a validator's work: it says that it lives, and it ends whatever it is at.

Nothing ends a thread that computes or waits. So where a check does not end, or the process is told
to end and its work outlasts the grace, another thread gives back what was claimed and ends all.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from runspec.core.errors import UserError
from runspec.core.process import EXIT_INTERNAL
from verify.client import CoordinatorClient, RunFinished
from verify.stages import Stage

if TYPE_CHECKING:
    from verify.validator import Validator

HEARTBEAT_S = 10.0
GRACE_S = 8.0
"""After SIGTERM; what is judged until then is handed in. A supervisor kills after 20 s."""
RELEASE_S = 2.0
"""For giving back what is claimed: whoever is killed before has a failed attempt at each."""


@contextmanager
def heartbeats(
    client: CoordinatorClient, validator: Validator, log: logging.Logger
) -> Iterator[None]:
    """Tells the coordinator every few seconds that this process lives, long prefills included, and
    ends it where a check does not."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.is_set():
            if stage := validator.stages.overdue():
                _end_stalled(client, stage, log)
            try:
                client.heartbeat({"busy_s": validator.busy_s, "checked": validator.checked})
            except RunFinished:
                pass  # the main thread hears of it too, unless a check hangs
            except UserError as error:  # the main thread meets it too, and ends the process
                log.warning("no heartbeat: %s", error)
            ended.wait(HEARTBEAT_S)

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


@contextmanager
def leaving(
    stop: threading.Event, client: CoordinatorClient, log: logging.Logger
) -> Iterator[None]:
    """Ends the process, exit code 0, where the block goes on for longer than the grace after `stop`
    was set: it waits for a coordinator that is away or for weights, or is at a long prefill."""
    ended = threading.Event()

    def leave() -> None:
        stop.wait()
        if ended.wait(GRACE_S):
            return
        log.info("told to end; gives back %d submissions", len(client.claims))
        releasing = threading.Thread(target=_give_back, args=(client,), daemon=True)
        releasing.start()
        releasing.join(RELEASE_S)
        logging.shutdown()
        os._exit(0)

    threading.Thread(target=leave, name="leave", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _give_back(client: CoordinatorClient) -> None:
    if claims := client.claims:
        with suppress(UserError, RunFinished):
            client.release_claims(claims)


def _end_stalled(client: CoordinatorClient, stage: Stage, log: logging.Logger) -> None:
    """Names what a check hangs at, and ends the process."""
    seconds = time.monotonic() - stage.begun
    log.error(
        "%s has taken %.0f s at submission %s: this process ends, and is to be started again",
        *(stage.name, seconds, ", ".join(digest[:12] for digest in stage.submissions)),
    )
    with suppress(UserError, RunFinished):
        client.release_claims(stage.submissions, f"{stage.name} did not end after {seconds:.0f} s")
    logging.shutdown()
    os._exit(EXIT_INTERNAL)
