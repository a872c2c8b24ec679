"""Watchdog of a validator: heartbeats, and the end of a process that hangs or stops late.

No thread can end another that computes or hangs in C. So a check's stages are timed (`Stages`), and
another thread looks at them. If a stage is overdue, or the work outlasts the grace after SIGTERM,
that thread gives claimed submissions back to the coordinator and ends the process.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from runspec.core.errors import UserError
from runspec.core.process import EXIT_INTERNAL
from verify import HEARTBEAT_S, STAGE_DEADLINES_S
from verify.client import CoordinatorClient, RunFinished

GRACE_S = 8.0
"""Seconds after SIGTERM in which finished verdicts are handed in. A supervisor kills after 20 s."""
RELEASE_S = 2.0
"""Seconds for giving back claims. A claim that is not given back counts as a failed attempt."""


@dataclass(frozen=True)
class Stage:
    """A part of a check that is under way."""

    name: str
    """Key of `STAGE_DEADLINES_S`."""
    submissions: tuple[str, ...]
    """Digests of the submissions; more than one if they share a prefill."""
    begun: float
    """`time.monotonic()`."""


class Stages:
    """The stages of one thread's checks; any thread may read them."""

    def __init__(self) -> None:
        self.current: Stage | None = None
        """The stage that is under way; None between stages."""
        self.spent_s: dict[str, float] = defaultdict(float)
        """Total seconds spent in each stage."""

    @contextmanager
    def of(self, name: str, *submissions: str) -> Iterator[None]:
        """Time the block as a stage."""
        begun = time.monotonic()
        self.current = Stage(name, submissions, begun)
        try:
            yield
        finally:
            self.current = None
            self.spent_s[name] += time.monotonic() - begun

    def overdue(self) -> Stage | None:
        """Return the current stage if its deadline has passed."""
        stage = self.current
        if stage is None or time.monotonic() < stage.begun + STAGE_DEADLINES_S[stage.name]:
            return None
        return stage


class Checking(Protocol):
    """State of a validator that a heartbeat reports."""

    stages: Stages
    """Stages of the check that is under way."""
    busy_s: float
    """Total seconds of checking."""
    checked: int
    """Number of submissions that were checked."""


@contextmanager
def _beside(name: str, work: Callable[[threading.Event], None]) -> Iterator[None]:
    """Run `work` in a thread beside the block; its event is set when the block ends."""
    ended = threading.Event()
    threading.Thread(target=work, args=(ended,), name=name, daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def heartbeats(
    client: CoordinatorClient, validator: Checking, log: logging.Logger
) -> AbstractContextManager[None]:
    """Send a heartbeat every few seconds, long prefills included.

    Ends the process if a stage of a check is overdue.
    """

    def beat(ended: threading.Event) -> None:
        while not ended.is_set():
            if stage := validator.stages.overdue():
                _end_stalled(client, stage, log)
            try:
                client.heartbeat({"busy_s": validator.busy_s, "checked": validator.checked})
            except RunFinished:
                pass  # the main thread receives this too, unless a check hangs
            except UserError as error:  # the main thread receives it too, and ends the process
                log.warning("no heartbeat: %s", error)
            ended.wait(HEARTBEAT_S)

    return _beside("heartbeat", beat)


def leaving(
    stop: threading.Event, client: CoordinatorClient, log: logging.Logger
) -> AbstractContextManager[None]:
    """End the process, exit code 0, if the block outlasts the grace after `stop` is set.

    The block may be waiting for a coordinator or for weights, or may be in a long prefill.
    """

    def leave(ended: threading.Event) -> None:
        stop.wait()
        if ended.wait(GRACE_S):
            return
        log.info("SIGTERM: giving back %d submissions", len(client.claims))

        def give_back() -> None:
            if claims := client.claims:
                with suppress(UserError, RunFinished):
                    client.release_claims(claims)

        releasing = threading.Thread(target=give_back, daemon=True)
        releasing.start()
        releasing.join(RELEASE_S)
        logging.shutdown()
        os._exit(0)

    return _beside("leave", leave)


def _end_stalled(client: CoordinatorClient, stage: Stage, log: logging.Logger) -> None:
    """Log and report the stage that hangs, then end the process."""
    seconds = time.monotonic() - stage.begun
    log.error(
        "%s has taken %.0f s at submission %s: this process ends; start it again",
        *(stage.name, seconds, ", ".join(digest[:12] for digest in stage.submissions)),
    )
    with suppress(UserError, RunFinished):
        client.release_claims(stage.submissions, f"{stage.name} did not end after {seconds:.0f} s")
    logging.shutdown()
    os._exit(EXIT_INTERNAL)
