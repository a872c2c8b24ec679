"""Which roles must be started again, one by one, for a rolling change to be true everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from runspec.plan.changes import Change, of_class

Readers = Literal["coordinator", "publisher", "validators", "samplers"]

ORDER: tuple[Readers, ...] = ("coordinator", "publisher", "validators", "samplers")
"""The coordinator first: it serves the spec that the others read."""
READERS: dict[str, tuple[Readers, ...]] = {
    # Whoever serves and fetches versions goes by their manifests.
    "broadcast.format": ("publisher",),
    "broadcast.anchor_every": ("publisher",),
    "verify.engine": ("coordinator", "validators"),
    "verify.admission": ("coordinator",),
    "verify.prefill_share": ("coordinator", "validators"),
    "verify.prefill_floor": ("coordinator", "validators"),
    "verify.newcomer_share": ("coordinator",),
    "verify.profiles": ("coordinator", "validators"),
    "verify.thresholds": ("coordinator", "validators"),
    "verify.backlog": ("coordinator",),
    "verify.proxies": ("coordinator",),
    # Who needs a version gives up on fetching it after as long.
    "verify.lease_timeout": ("coordinator", "validators", "samplers"),
}
"""Who reads a rolling field, or a block of them, by path."""


def renewed(changes: Sequence[Change]) -> tuple[Readers, ...]:
    """The readers of all rolling changes, in the order of their turns."""
    readers = {reader for change in of_class(changes, "rolling") for reader in _readers(change)}
    return tuple(reader for reader in ORDER if reader in readers)


def _readers(change: Change) -> tuple[Readers, ...]:
    return next(READERS[p] for p in READERS if f"{change.path}.".startswith(f"{p}."))
