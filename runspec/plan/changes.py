"""Changes between two resolved specs, the effect of each on a run, and the roles to restart.

Specs hold references to secrets, never their values; so changes never show a secret.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from runspec.core.canonical import digest_bytes
from runspec.core.spec.fields import CHANGE_CLASSES, ChangeClass
from runspec.core.spec.schema import RunSpec
from runspec.core.spec.schema_fields import field_at

Kind = Literal["add", "change", "remove"]
LIVE: frozenset[ChangeClass] = frozenset({"hot", "rolling"})
"""Change classes that a run applies while it works."""
_ORDER_IS_LEARNT = ("data.sources", "reward")
"""Named lists whose order decides draws and sums."""
_ONLY_RAISED = {
    "steps": "some may be trained or sampled already",
    "groups_per_submission": "leases of more may be out",
}
"""Fields of class restart that are newrun if they are lowered: the reason by key."""
_LONGEST_SHOWN = 500

Readers = Literal["coordinator", "publisher", "validators", "samplers"]

ORDER: tuple[Readers, ...] = ("coordinator", "publisher", "validators", "samplers")
"""Order of restarts: the coordinator first, because it serves the spec to the others."""
READERS: dict[str, tuple[Readers, ...]] = {
    # Manifests tell those who serve and fetch versions.
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
    # It is also the time limit for fetching a version.
    "verify.lease_timeout": ("coordinator", "validators", "samplers"),
}
"""Roles that read a rolling field, or a block of them, by path."""


@dataclass(frozen=True)
class Change:
    """One value that differs."""

    path: str
    """Path with names for the items of named lists: `samplers.volunteers.replicas`."""
    before: Any
    """JSON value; None if there was none."""
    after: Any
    """JSON value; None if it was removed."""
    kind: Kind
    change_class: ChangeClass
    reason: str = ""
    """Reason why the class is not that of the field."""

    def __str__(self) -> str:
        before = "unset" if self.kind == "add" else shown(self.before)
        after = "unset" if self.kind == "remove" else shown(self.after)
        reason = f" ({self.reason})" if self.reason else ""
        return f"{self.path}: {before} there, {after} now{reason}"


def shown(value: Any) -> str:
    """Return a value as text; a long text, such as a profile, by its digest."""
    if isinstance(value, str) and len(value) > _LONGEST_SHOWN:
        return f"{len(value)} characters, BLAKE3 {digest_bytes(value.encode())[:16]}"
    return json.dumps(value)


def difference(old: RunSpec | None, new: RunSpec) -> list[Change]:
    """Return every changed value, in the order of the new spec; removed ones come last.

    Args:
        old: spec of the run; None for a new run: every value is added.
        new: the requested spec.
    """
    before = _flat(old) if old is not None else {}
    after = _flat(new)
    changes: list[Change] = []
    for path in [*after, *(path for path in before if path not in after)]:
        then, now = before.get(path), after.get(path)
        if isinstance(then, tuple) or isinstance(now, tuple):
            changes += _reordered(path, then or (), now or ())
        elif path not in before and not _is_nothing(now):
            changes.append(Change(path, None, now, "add", _class(path)))
        elif path not in after and not _is_nothing(then):
            changes.append(Change(path, then, None, "remove", _class(path)))
        elif path in before and path in after and then != now:
            changes.append(_changed(path, then, now))
    if new.supervised is not None:
        changes = [_of_documents(change) for change in changes]
    return changes


def severest(changes: Sequence[Change]) -> ChangeClass | None:
    """Return the most severe class of changes; None without any."""
    order = list(CHANGE_CLASSES)
    return max((change.change_class for change in changes), key=order.index, default=None)


def of_class(changes: Sequence[Change], change_class: ChangeClass) -> list[Change]:
    return [change for change in changes if change.change_class == change_class]


def _changed(path: str, before: Any, after: Any) -> Change:
    change_class, reason = _class(path), _ONLY_RAISED.get(path.rpartition(".")[2])
    if change_class == "restart" and reason and after < before:
        return Change(path, before, after, "change", "newrun", f"{reason}: it may only be raised")
    return Change(path, before, after, "change", change_class)


def _of_documents(change: Change) -> Change:
    """Return a change to a run that trains on documents: its rows are numbered by their length."""
    if change.path != "learner.packing.tokens":
        return change
    return replace(change, change_class="newrun", reason="rows of documents have this length")


def _class(path: str) -> ChangeClass:
    field = field_at(path)
    assert field is not None, f"{path} of a resolved spec is in the schema"
    return field.change


def _reordered(path: str, before: tuple[str, ...], after: tuple[str, ...]) -> Iterator[Change]:
    """Compare the order of a named list's items, among those that are in both."""
    then = [name for name in before if name in after]
    now = [name for name in after if name in before]
    if then != now:
        learnt = path in _ORDER_IS_LEARNT
        yield Change(path, then, now, "change", "newrun" if learnt else "restart", "another order")


def _is_nothing(value: Any) -> bool:
    """Return whether a value is empty, which equals no value."""
    return value in (None, {}, [])


def _flat(spec: RunSpec) -> dict[str, Any]:
    return dict(_leaves(spec.model_dump(mode="json", by_alias=True), ""))


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Return the leaves under a path; for a named list also the tuple of names."""
    named = isinstance(value, list) and all(isinstance(v, dict) and "name" in v for v in value)
    if named and value:
        names = tuple(item["name"] for item in value)
        yield path, names
        value = dict(zip(names, value, strict=True))
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


def roles_to_restart(changes: Sequence[Change]) -> tuple[Readers, ...]:
    """Return the roles that a set of changes restarts one by one, in order."""
    readers = {reader for change in of_class(changes, "rolling") for reader in _readers(change)}
    return tuple(reader for reader in ORDER if reader in readers)


def _readers(change: Change) -> tuple[Readers, ...]:
    return next(READERS[p] for p in READERS if f"{change.path}.".startswith(f"{p}."))
