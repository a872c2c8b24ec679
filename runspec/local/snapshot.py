"""Snapshot of a run at one moment, read from its directory and its ledger alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path

from broadcast.layout import manifest_name, stored_versions
from runspec.core.errors import UserError
from runspec.core.spec.resolved import load_resolved
from runspec.core.spec.schema import RunSpec
from runspec.local.children import birth
from runspec.local.metrics import Row, read_rows
from runspec.local.role_logs import stages
from runspec.local.run_dir import holder
from runspec.local.state import EventRow, RoleRow, RunRow, RunState, SessionRow
from verify.coordinator.ledger.ledger import Dropped, read_dropped

EVENTS = 10
REMEDY = "; remedy: "
"""Between the cause and the remedy in the reason of a run that failed."""


@dataclass(frozen=True)
class Snapshot:
    """A run, looked at once. Times are seconds since the epoch."""

    directory: Path
    spec: RunSpec
    at: float
    """When it was looked at."""
    held_by: str | None
    """Its supervisor, in words."""
    run: RunRow | None
    """None before the first session."""
    session: SessionRow | None
    """The newest."""
    roles: Sequence[RoleRow]
    events: Sequence[EventRow]
    """The newest, oldest first."""
    rows: Sequence[Row]
    """metrics.jsonl, a row a trained step, in order."""
    versions: Sequence[int]
    """Policy versions that the origin serves, in order."""
    published_at: float | None
    """When the newest of them came out."""
    wall_s: float
    """Seconds that the run was up, over all its sessions."""
    dropped: Dropped = field(default_factory=Dropped)
    """Failures of validators and graders."""
    ledger_unread: str = ""
    """Why nothing is known of that; empty where it is."""
    stages: Mapping[str, str] = field(default_factory=dict)
    """Long stages in which roles of a live run are, by role."""

    @property
    def alive(self) -> bool:
        return self.held_by is not None

    @property
    def lost(self) -> bool:
        """Whether its supervisor died before it could record the end of the run."""
        return not self.alive and (self.run is None or self.run.state in ("starting", "running"))

    @property
    def state(self) -> str:
        """starting, running, paused, interrupted, failed or finished."""
        if self.lost:
            return "interrupted"
        return self.run.state if self.run else "starting"

    @property
    def reason(self) -> str:
        """Why it is in that state, and what to do about it."""
        if self.lost:
            return "its supervisor is gone; resume it to go on"
        return self.run.reason if self.run else ""

    @property
    def short_reason(self) -> str:
        """The reason without the remedy."""
        return self.reason.partition(REMEDY)[0]

    @property
    def trained(self) -> int:
        """Steps that are trained."""
        return int(self.rows[-1]["step"]) + 1 if self.rows else 0

    @property
    def published(self) -> int | None:
        """The newest version that the origin serves."""
        return self.versions[-1] if self.versions else None


def look_at(run_dir: Path, *, events: int | None = EVENTS, ledger: bool = True) -> Snapshot:
    """Reads a run directory, and the ledger where that lies elsewhere.

    Args:
        run_dir: of the run.
        events: how many of the newest; None for all.
        ledger: whether to read that, which a database may be slow to answer.

    Raises:
        UserError: its spec or its state cannot be read.
    """
    spec, held_by = load_resolved(run_dir), holder(run_dir)
    store = run_dir / "store" / "origin"
    versions = stored_versions(store, spec.name)
    dropped, unread = _dropped(run_dir, spec) if ledger else (Dropped(), "it was not read")
    with closing(RunState(run_dir)) as state:
        seen = Snapshot(
            directory=run_dir,
            spec=spec,
            at=time.time(),
            held_by=held_by,
            run=state.run(),
            session=state.session(),
            roles=state.roles(),
            events=state.events(events),
            rows=read_rows(run_dir),
            versions=versions,
            published_at=_written(store / manifest_name(spec.name, versions[-1]))
            if versions
            else None,
            wall_s=state.wall_s(),
            dropped=dropped,
            ledger_unread=unread,
            stages=stages(run_dir / "logs") if held_by else {},
        )
    if seen.alive:
        return seen
    return replace(seen, roles=[_unsupervised(role) for role in seen.roles])


def _unsupervised(role: RoleRow) -> RoleRow:
    """A role whose supervisor is gone, which may have died before it recorded the role's end."""
    if role.pid and birth(role.pid) == role.born:
        return role
    at_rest = role.state in ("waiting", "finished", "failed")
    return replace(role, state=role.state if at_rest else "ended", pid=None)


def _dropped(run_dir: Path, spec: RunSpec) -> tuple[Dropped, str]:
    """Read the ledger, or return why it cannot be read."""
    try:
        return read_dropped(run_dir, spec), ""
    except UserError as error:
        return Dropped(), f"{error.place}: {error.thing}"


def _written(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # pruned meanwhile
        return None
