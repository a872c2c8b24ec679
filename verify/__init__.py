"""Work without trust: leases, submissions, proofs, checks, verdicts, coordinator, ledger and audit.

Here are the timeouts between coordinator, workers, validators and commands, and the deadlines of a
check. Each timeout is longer than the ones that it waits for. So the first process to give up is
the one that is in trouble, and its message names the cause.
"""

from __future__ import annotations

STORAGE_S = 600.0
"""Seconds that the coordinator waits for its disk or database; it answers 503 and 507 meanwhile."""
RESTART_S = 300.0
"""Seconds that starting the coordinator again may take."""
COORDINATOR_S = STORAGE_S + RESTART_S
"""Seconds that workers and validators wait for a coordinator that is away or answers 5xx."""
BACKLOG_S = 24 * 3600.0
"""Seconds that a worker with a submission waits while the coordinator answers 429. The lease lasts
as long; the end of the lease, which comes before, has another answer."""
HEARTBEAT_S = 10.0
"""Seconds between two heartbeats of a validator, and of a worker where workers are few."""
PERSON_S = 60.0
"""Seconds that a command waits for a coordinator that is away, while a person looks at it."""
STAGE_DEADLINES_S = {
    "decoding": 300.0,
    "rows": 300.0,
    "grading": 7200.0,
    "prefill": 7200.0,
    "prefill checks": 300.0,
    "duplicates": 300.0,
}
"""Seconds that each stage of a validator's check may take. They are far above what the largest
legal submission takes (docs/verify.md), so a stage that takes longer hangs. The sandbox has
deadlines of its own. A prefill may compile, which takes long."""
