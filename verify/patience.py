"""How long the coordinator and those who ask it wait for one another: said here and nowhere else.

Whoever waits outlasts what it waits for, so that the first to give up is the one that is in
trouble, and its message names it.
"""

from __future__ import annotations

STORAGE_S = 600.0
"""The coordinator, for its disk or its database (answers 503 and 507 meanwhile); then it ends."""
RESTART_S = 300.0
"""Whoever runs it may take to start it again."""
COORDINATOR_S = STORAGE_S + RESTART_S
"""Workers and validators, for a coordinator that is away or answers 5xx; then they end."""
BACKLOG_S = 24 * 3600.0
"""A worker with a submission, as long as the coordinator says when to come again (429). The lease
lasts as long; its end, which comes before, is another answer."""
PERSON_S = 60.0
"""A command that a person looks at, for a coordinator that is away."""
