"""Names that a layer adds to a named list, where the name of a lower layer may have been meant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runspec.core.spec.findings import Finding, Place
from runspec.core.spec.schema_keys import close_match

_OBJECTS = {
    "data.sources": "source",
    "reward": "reward term",
    "samplers": "pool",
    "broadcast.relays": "relay",
    "secrets": "secret",
    "verify.profiles": "profile",
}


@dataclass(frozen=True)
class NewName:
    """An object that a layer adds to a list of lower layers."""

    place: Place
    """Where the layer names it."""
    parent: str
    """The list's path, like `samplers`."""
    name: str
    known: Sequence[str]
    """Names in the layers below; at least one."""


def judge_new_names(findings: list[Finding], new_names: Sequence[NewName]) -> list[Finding]:
    """The findings of a spec, with one error for each new object that lacks required keys.

    A new object that lacks nothing is left alone, unless one slip of a letter makes its name that
    of a lower layer: that is a warning.
    """
    for new in new_names:
        path = f"{new.parent}.{new.name}"
        lacking = [f for f in findings if f.code == "missing-key" and f.path.startswith(f"{path}.")]
        if not lacking and not any(_one_slip(new.name, known) for known in new.known):
            continue
        keys = ", ".join(finding.path.removeprefix(f"{path}.") for finding in lacking)
        needs = f", and a new one needs {keys}" if lacking else ""
        match = close_match(new.name, new.known)
        meant = f"did you mean {match}?" if match else f"there are: {', '.join(new.known)}."
        finding = Finding(
            new.place,
            "unknown-name",
            f"no {new.name!r} in the layers below{needs}",
            path=path,
            suggestion=f"{meant} A new name makes a new {_OBJECTS.get(new.parent, 'object')}",
            severity="error" if lacking else "warning",
            blocking=bool(lacking),
        )
        findings = [*(f for f in findings if f not in lacking), finding]
    return findings


def _one_slip(name: str, known: str) -> bool:
    """Whether a letter was left out, doubled or added, or letters change places."""
    short, long = sorted((name, known), key=len)
    if len(short) == len(long):
        return sorted(short) == sorted(long)
    return any(
        letter.isalpha() and long[:at] + long[at + 1 :] == short for at, letter in enumerate(long)
    )
