"""How processes that grade are started: in the sandbox, or where none works without."""

from __future__ import annotations

import logging
import threading
from functools import cache

from runspec.core.errors import UserError
from runspec.core.spec.schema import RunSpec
from sampler import sandbox
from sampler.tasks.interfaces import find_kind


def mechanisms(*, required: bool, place: str) -> tuple[str, ...]:
    """What isolates a process that grades; empty where nothing can, and only its limits hold.

    Args:
        required: whether there must be a sandbox; else its absence is a warning, once.
        place: what needs it, for messages.

    Raises:
        UserError: it is required, and none works.
    """
    if required:
        sandbox.require(place)
    report = sandbox.probe()
    if report.isolates:
        return report.working
    with _WARNING:  # several graders start at once, and a cache lets two in
        _warn(place)
    return ()


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
