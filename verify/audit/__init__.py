"""`python -m verify audit`: replays a run's ledger without trusting anybody.

It reads the run directory only (docs/audit.md).
"""
