"""A plan as a file: what was decided, and the state of the run that it was decided on.

`runspec plan -o FILE` writes one and `runspec apply FILE` does what it says, or refuses. It carries
the resolved spec, so that nothing but the file is needed; of secrets a spec holds references only.
Its digest tells an edited file from the one that was reviewed. It is no signature: whoever may
write the file can make another plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from runspec.core import distribution
from runspec.core.canonical import canonical_json, parse_object
from runspec.core.errors import UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.hashing import digest_bytes, is_digest
from runspec.core.spec.resolved import MAX_BYTES as MAX_SPEC_BYTES
from runspec.core.spec.resolved import dump_resolved, parse_resolved, spec_digest
from runspec.core.spec.schema import RunSpec

KIND = "Plan"
MAX_BYTES = MAX_SPEC_BYTES + 64 * 1024
_MARK = re.compile(rb'"kind"\s*:\s*"Plan"')
_FIELDS = {
    "kind": str,
    "version": str,
    "runspec": str,
    "run": str,
    "created": float,
    "serial": int,
    "state_digest": str | None,
    "spec_digest": str,
    "spec": dict,
    "digest": str,
}


class BadPlan(UserError):
    """A file that says it is a plan and is none that can be believed."""

    exit_code = 2


@dataclass(frozen=True)
class Seen:
    """The state of a run that something was decided on."""

    serial: int
    """0 for a run that was not there."""
    spec_digest: str | None
    """Of the run's own spec; None for a run that was not there."""


@dataclass(frozen=True)
class SavedPlan:
    """What `apply` is to do, and on what state of the run."""

    spec: RunSpec
    seen: Seen
    created: float
    """Seconds since the epoch."""


def save_plan(path: Path, plan: SavedPlan) -> None:
    """Writes a plan, whole or not at all, readable by its owner alone.

    Raises:
        UserError: it cannot be written.
    """
    content = {
        "kind": KIND,
        "version": plan.spec.version,
        "runspec": version(distribution.NAME),
        "run": plan.spec.name,
        "created": plan.created,
        "serial": plan.seen.serial,
        "state_digest": plan.seen.spec_digest,
        "spec_digest": spec_digest(plan.spec),
        "spec": parse_object(dump_resolved(plan.spec), max_bytes=MAX_SPEC_BYTES),
    }
    whole = {**content, "digest": digest_bytes(canonical_json(content))}
    write_atomic(path, canonical_json(whole) + b"\n", mode=0o600)


def read_plan(path: Path) -> SavedPlan | None:
    """Reads a plan; None for a file that is something else, like a spec.

    Raises:
        BadPlan: it was edited, is damaged, or was made by another version of runspec.
        UserError: it is larger than any plan.
        OSError: it cannot be read.
    """
    data = read_bounded(path, MAX_BYTES)
    if not data.lstrip().startswith(b"{") or _MARK.search(data) is None:
        return None
    try:
        content = parse_object(data, max_bytes=MAX_BYTES)
        return _parse(content, str(path))
    except (ValueError, UserError) as error:
        said = error.thing if isinstance(error, UserError) else str(error)
        raise BadPlan(
            f"not a plan that can be applied: {said}",
            place=str(path),
            remedy="make a new one with `runspec plan -o`",
        ) from error


def _parse(content: Mapping[str, Any], place: str) -> SavedPlan:
    made_by, ours = content.get("runspec"), version(distribution.NAME)
    if made_by != ours:
        raise ValueError(f"made by runspec {str(made_by)[:40]!r}, this is {ours!r}")
    if content.keys() != _FIELDS.keys():
        raise ValueError(f"keys {sorted(content.keys() ^ _FIELDS.keys())!r:.200}")
    for name, kind in _FIELDS.items():
        if not isinstance(content[name], kind) or isinstance(content[name], bool):
            raise ValueError(f"{name} is no {getattr(kind, '__name__', kind)}")
    signed = {name: value for name, value in content.items() if name != "digest"}
    if digest_bytes(canonical_json(signed)) != content["digest"]:
        raise ValueError("its content was edited: the digest is another")
    if content["state_digest"] is not None and not is_digest(content["state_digest"]):
        raise ValueError("state_digest is no digest")
    spec = parse_resolved(canonical_json(content["spec"]), place=place)
    said, found = (content["run"], content["spec_digest"]), (spec.name, spec_digest(spec))
    if said != found or content["serial"] < 0:
        raise ValueError("what it says of its spec does not fit the spec")
    return SavedPlan(spec, Seen(content["serial"], content["state_digest"]), content["created"])
