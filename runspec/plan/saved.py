"""Plan files: a plan, and the state of the run that it was made for.

`runspec plan -o FILE` writes one and `runspec apply FILE` does what it says, or refuses. It carries
the resolved spec, so that nothing but the file is needed; of secrets a spec holds references only.
Its digest tells an edited file from the one that was reviewed. It is no signature: whoever may
write the file can make another plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError

from runspec.core import entry_points
from runspec.core.canonical import canonical_json, digest_bytes, parse_object
from runspec.core.errors import BadUsage, UserError
from runspec.core.files import read_bounded, write_atomic
from runspec.core.spec.load import MAX_BYTES as MAX_SPEC_BYTES
from runspec.core.spec.load import dump_resolved, parse_resolved, spec_digest
from runspec.core.spec.schema import RunSpec

KIND = "Plan"
MAX_BYTES = MAX_SPEC_BYTES + 64 * 1024
_MARK = re.compile(rb'"kind"\s*:\s*"Plan"')


class BadPlan(BadUsage):
    """Error: a file declares itself a plan and is not valid."""


@dataclass(frozen=True)
class Seen:
    """State of a run that a plan was made for."""

    serial: int
    """0 for a run that did not exist."""
    spec_digest: str | None
    """Digest of the run's spec; None for a run that did not exist."""


@dataclass(frozen=True)
class SavedPlan:
    """Plan that `apply` carries out, and the state of the run that it needs."""

    spec: RunSpec
    seen: Seen
    created: float
    """Seconds since the epoch."""


_Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Document(BaseModel):
    """Content of the file."""

    model_config = ConfigDict(extra="forbid", strict=True)

    kind: Literal["Plan"]
    version: str
    runspec: str
    run: str
    created: float
    serial: NonNegativeInt
    state_digest: _Digest | None
    spec_digest: str
    spec: dict[str, Any]
    digest: str


def save_plan(path: Path, plan: SavedPlan) -> None:
    """Write a plan atomically, readable by its owner alone.

    Raises:
        UserError: it cannot be written.
    """
    content = {
        "kind": KIND,
        "version": plan.spec.version,
        "runspec": version(entry_points.NAME),
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
    """Read a plan; None for another file, like a spec.

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
        made_by, ours = content.get("runspec"), version(entry_points.NAME)
        if made_by != ours:
            raise ValueError(f"made by runspec {str(made_by)[:40]!r}, this is {ours!r}")
        said = _Document.model_validate(content)
        signed = {name: value for name, value in content.items() if name != "digest"}
        if digest_bytes(canonical_json(signed)) != said.digest:
            raise ValueError("its content was edited: the digest is another")
        spec = parse_resolved(canonical_json(said.spec), place=str(path))
        if (said.run, said.spec_digest) != (spec.name, spec_digest(spec)):
            raise ValueError("what it says of its spec does not fit the spec")
    except (ValueError, UserError) as error:
        reason = error.thing if isinstance(error, UserError) else str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{first['loc'][0]}: {first['msg']}"
        raise BadPlan(
            f"not a plan that can be applied: {reason}",
            place=str(path),
            remedy="make a new one with `runspec plan -o`",
        ) from error
    return SavedPlan(spec, Seen(said.serial, said.state_digest), said.created)
