"""What the ledger says of the workers of a run whose coordinator is not up."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

from runspec.core.errors import UserError
from runspec.core.spec.schema import RunSpec
from verify.audit.ledger_rows import NoLedger
from verify.audit.snapshot import open_snapshot
from verify.coordinator.machine.policy import Policy
from verify.coordinator.machine.state import State
from verify.coordinator.machine.transitions import IllegalTransition, replay
from verify.coordinator.services.status import workers_report
from verify.ledger import BadRow, decode_event


def read_workers(run_dir: Path, spec: RunSpec) -> dict[str, Any]:
    """`workers` and `banned` as `GET /v1/status` has them, by the ledger, wherever it lies.

    Raises:
        UserError: it cannot be read.
    """
    policy = Policy.of(spec)
    try:
        with closing(open_snapshot(run_dir, spec)) as snapshot:
            events = (decode_event(row.kind, row.body) for row in snapshot.rows())
            return workers_report(replay(policy, events))
    except NoLedger:  # nobody has started a coordinator
        return workers_report(State(policy))
    except (BadRow, IllegalTransition) as error:
        raise UserError(
            f"the ledger cannot be replayed: {error}",
            place=str(run_dir),
            remedy=f"`python -m verify audit {run_dir}` says what is wrong with it",
        ) from error
