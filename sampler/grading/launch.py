"""How processes that grade are started: in the sandbox, or where none works without."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import IO, Protocol

from runspec.core.errors import UserError
from runspec.core.spec.schema import RunSpec
from sampler import sandbox
from sampler.grading import unconfined
from sampler.sandbox import Finished
from sampler.tasks.interfaces import find_kind


class Running(Protocol):
    """A process as `sampler.sandbox.Isolated` and `unconfined.Unconfined` have it."""

    stdin: IO[bytes]
    stdout: IO[bytes]

    def stop(self) -> None: ...

    def kill(self) -> Finished: ...

    def wait(self, timeout_s: float | None) -> Finished: ...


@dataclass(frozen=True)
class Launcher:
    """`start` and `run`, as `sampler.sandbox` has them."""

    start: Callable[..., Running]
    run: Callable[..., Finished]


SANDBOX = Launcher(sandbox.start, sandbox.run)
UNCONFINED = Launcher(unconfined.start, unconfined.run)


def launcher(*, required: bool, place: str) -> Launcher:
    """The sandbox where one works.

    Args:
        required: whether there must be one; else its absence is a warning, once.
        place: what needs it, for messages.

    Raises:
        UserError: it is required, and none works.
    """
    if required:
        sandbox.require(place)
    if sandbox.probe().isolates:
        return SANDBOX
    with _WARNING:  # several graders start at once, and a cache lets two in
        _warn(place)
    return UNCONFINED


def require_graders(spec: RunSpec) -> None:
    """Makes sure that this machine may grade for a run: what executes answers has its sandbox.

    Raises:
        UserError: no sandbox works; or `sandboxed: false` with an untrusted pool, or a kind of
            reward that no package offers.
    """
    untrusted = [pool.name for pool in spec.samplers if pool.trust == "untrusted"]
    for reward in spec.reward:
        kind = find_kind(reward.kind)
        if kind.role == "length" or not kind.executes_answers:
            continue
        if untrusted and not reward.sandboxed:
            raise UserError(
                f"kind {reward.kind} would run, unconfined, what whoever runs the untrusted pool "
                f"{untrusted[0]} wrote",
                place=f"reward.{reward.name}.sandboxed",
                remedy="set it to true; docs/sandbox.md says what a machine needs",
            )
        if reward.sandboxed:
            sandbox.require(f"reward.{reward.name}")


_WARNING = threading.Lock()


@cache
def _warn(place: str) -> None:
    logging.getLogger(__name__).warning(
        "%s: no sandbox works on this machine; answers are graded in processes without one. "
        "`python -m sampler.sandbox` names what to switch on (docs/sandbox.md, Making it work)",
        place,
    )
