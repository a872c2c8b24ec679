"""How many submissions validators came to no verdict on, by the ledger, wherever it lies."""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from runspec.core.errors import UserError
from runspec.core.spec.schema import RunSpec
from verify.audit.snapshot import NoLedger, open_snapshot
from verify.coordinator.events import SubmissionSetAside
from verify.ledger import BadRow, decode_event

_KIND = SubmissionSetAside.__name__


@dataclass(frozen=True)
class SetAside:
    """Those that were set aside (`docs/coordinator.md`)."""

    count: int = 0
    last_at: float | None = None
    """When the last of them was, seconds since the epoch."""


def read_set_aside(run_dir: Path, spec: RunSpec) -> SetAside:
    """Reads the ledger of a run, which may be at work.

    Raises:
        UserError: it cannot be read.
    """
    try:
        with closing(open_snapshot(run_dir, spec)) as snapshot:
            rows = list(snapshot.rows(_KIND))
    except NoLedger:  # nobody has started a coordinator
        return SetAside()
    if not rows:
        return SetAside()
    try:
        return SetAside(len(rows), decode_event(rows[-1].kind, rows[-1].body).at)
    except BadRow as error:
        raise UserError(
            f"the ledger's last {_KIND} cannot be read: {error}",
            place=str(run_dir),
            remedy=f"`python -m verify audit {run_dir}` says what is wrong with it",
        ) from error
